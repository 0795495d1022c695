# /// script
# dependencies = ["openai==3.57.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `openai` package, on Responses: whole, streamed, parsed, kept, in the background."""

from __future__ import annotations

from typing import Any

import openai

from bench.clients.cases import (
    API,
    CALL,
    HELLO,
    KEY,
    MODEL,
    ONCE,
    SLOWLY,
    Mode,
    case,
    check,
    expect,
    leave,
    limits,
    main,
)
from bench.clients.schemas import City, unknown_fields

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def client_of(key: str = KEY) -> Any:
    """Return a client that checks every answer strictly against the package's types."""
    return openai.OpenAI(base_url=API, api_key=key, max_retries=0, _strict_response_validation=True)


client = client_of()
responses = client.responses


@case("create, stream", ONCE)
def answers(_mode: Mode) -> str:
    whole = responses.create(model=MODEL, input="Hi")
    with responses.stream(model=MODEL, input="Hi") as stream:
        events = list(stream)
        streamed = stream.get_final_response().output_text
    check(whole.output_text == streamed == HELLO, (whole, streamed))
    unknown = unknown_fields(whole, *events)
    check(unknown <= {"Response.store", "ParsedResponse.store"}, unknown)
    return f"the same, whole and in {len(events)} events; its types lack `store` alone"


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
    asked = responses.create(input=CALL, **options)
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
    expect(openai.NotFoundError, lambda: responses.retrieve(made.id))
    return f"{len(items)} item, {tokens} tokens"


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
    slow = responses.create(model=MODEL, input=SLOWLY, background=True)
    leave(lambda: check(responses.cancel(slow.id).status == "cancelled", slow))
    return f"{len(stream)} events, {len(again)} of them again"


@case("leaves a stream: the worker stops", ONCE)
def leaves(_mode: Mode) -> str:
    def close_early() -> None:
        stream = responses.create(model=MODEL, input=SLOWLY, stream=True)
        next(iter(stream))
        stream.close()

    return leave(close_early)


@case("meets a rate limit and the end of the context", ONCE)
def limited(_mode: Mode) -> str:
    def ask(question: str, key: str) -> object:
        return client_of(key).responses.create(model=MODEL, input=question, stream=True)

    errors = limits(ask, openai.RateLimitError, openai.BadRequestError)
    return ", ".join(str(error.code) for error in errors)


if __name__ == "__main__":
    main()
