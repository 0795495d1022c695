# /// script
# dependencies = ["openai==3.57.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `openai` package, on Responses: whole, streamed, parsed, kept, in the background."""

from __future__ import annotations

from typing import Any

import openai
from pydantic import BaseModel

from bench.clients.cases import (
    API,
    KEY,
    LIMITED_KEY,
    MODEL,
    ONCE,
    OVERFLOW,
    WEATHER,
    Mode,
    case,
    check,
    clients_left,
    main,
    wait_until,
)

HELLO = "Hello from the script."
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
client = openai.OpenAI(base_url=API, api_key=KEY, max_retries=0)
responses: Any = client.responses


class City(BaseModel):
    """A city."""

    city: str


@case("create, stream", ONCE)
def answers(_mode: Mode) -> str:
    whole = responses.create(model=MODEL, input="Hi").output_text
    with responses.stream(model=MODEL, input="Hi") as stream:
        events = list(stream)
        streamed = stream.get_final_response().output_text
    check(whole == streamed == HELLO, (whole, streamed))
    return f"the same, whole and in {len(events)} events"


@case("parse, whole and streamed", ONCE)
def structured(_mode: Mode) -> str:
    whole = responses.parse(model=MODEL, input="Hi", text_format=City).output_parsed
    with responses.stream(model=MODEL, input="Hi", text_format=City) as stream:
        streamed = stream.get_final_response().output_parsed
    check(whole == streamed == City(city="Paris"), (whole, streamed))
    return repr(whole)


@case("a loop of tools by previous_response_id", ONCE)
def tools(_mode: Mode) -> str:
    options = {"model": MODEL, "tools": [WEATHER_TOOL]}
    asked = responses.create(input=f"CALL the tool. {WEATHER}", **options)
    call = asked.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = responses.create(input=[output], previous_response_id=asked.id, **options)
    check("sunny" in answer.output_text, answer)
    return f"{call.name}({call.arguments}) -> {answer.output_text}"


@case("retrieve, input_items, input_tokens, delete", ONCE)
def kept(_mode: Mode) -> str:
    made = responses.create(model=MODEL, input="Hi")
    check(responses.retrieve(made.id).output_text == HELLO, made)
    items = list(responses.input_items.list(made.id))
    tokens = responses.input_tokens.count(model=MODEL, input="Hi").input_tokens
    responses.delete(made.id)
    try:
        responses.retrieve(made.id)
    except openai.NotFoundError:
        return f"{len(items)} item, {tokens} tokens"
    raise AssertionError("it is still there")


@case("a conversation", ONCE)
def conversation(_mode: Mode) -> str:
    made = client.conversations.create(items=[{"role": "user", "content": "I am Ann."}])
    responses.create(model=MODEL, input="Hi", conversation=made.id)
    kinds = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    check(kinds == ["message", "message", "reasoning", "message"], kinds)
    return ", ".join(kinds)


@case("background: streamed, followed again, cancelled", ONCE)
def background(_mode: Mode) -> str:
    stream = list(responses.create(model=MODEL, input="Hi", background=True, stream=True))
    name = stream[0].response.id
    again = list(responses.retrieve(name, stream=True, starting_after=4))
    check([one.sequence_number for one in again] == [*range(5, len(stream))], again)
    slow = responses.create(model=MODEL, input="Answer SLOWLY.", background=True)
    left = clients_left()
    check(responses.cancel(slow.id).status == "cancelled", slow)
    wait_until(lambda: clients_left() > left)
    return f"{len(stream)} events, {len(again)} of them again"


@case("leaves a stream: the worker stops", ONCE)
def leaves(_mode: Mode) -> str:
    left = clients_left()
    stream = responses.create(model=MODEL, input="Answer SLOWLY.", stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: clients_left() > left)
    return "the gateway cancelled the request at its worker"


@case("meets a rate limit and the end of the context", ONCE)
def limits(_mode: Mode) -> str:
    limited: Any = openai.OpenAI(base_url=API, api_key=LIMITED_KEY, max_retries=0)
    try:
        for _ in range(2):
            limited.responses.create(model=MODEL, input="Hi")
    except openai.RateLimitError as error:
        code = error.code
    try:
        responses.create(model=MODEL, input=OVERFLOW, stream=True)
    except openai.BadRequestError as error:
        return f"{code}, {error.code}"
    raise AssertionError("no overflow")


if __name__ == "__main__":
    main()
