# /// script
# dependencies = ["openai==3.57.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `openai` package, on Responses: whole, streamed, parsed, kept, in the background."""

from typing import Any

import openai

from bench.clients import cases
from bench.clients.schemas import City, unknown_fields

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}


def client_of(key: str = cases.KEY) -> Any:
    """Return a client that checks every answer strictly against the package's types."""
    return openai.OpenAI(
        base_url=cases.API, api_key=key, max_retries=0, _strict_response_validation=True
    )


client = client_of()
responses = client.responses


@cases.once("create, stream")
def answers() -> str:
    whole = responses.create(model=cases.MODEL, input="Hi")
    with responses.stream(model=cases.MODEL, input="Hi") as stream:
        events = list(stream)
        streamed = stream.get_final_response().output_text
    cases.check(whole.output_text == streamed == cases.HELLO, (whole, streamed))
    unknown = unknown_fields(whole, *events)
    lacking = {name.partition(".")[2] for name in unknown}
    cases.check(lacking <= {"store", "presence_penalty", "frequency_penalty"}, unknown)
    return f"the same, whole and in {len(events)} events; its types lack {sorted(lacking)}"


@cases.once("parse, whole and streamed")
def structured() -> str:
    whole = responses.parse(model=cases.MODEL, input="Hi", text_format=City).output_parsed
    with responses.stream(model=cases.MODEL, input="Hi", text_format=City) as stream:
        streamed = stream.get_final_response().output_parsed
    cases.check(whole == streamed == City(city="Paris"), (whole, streamed))
    return repr(whole)


@cases.once("a loop of tools by previous_response_id")
def tools() -> str:
    options = {"model": cases.MODEL, "tools": [WEATHER_TOOL]}
    asked = responses.create(input=cases.CALL, **options)
    call = asked.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = responses.create(input=[output], previous_response_id=asked.id, **options)
    cases.check("sunny" in answer.output_text, answer)
    return f"{call.name}({call.arguments}) -> {answer.output_text}"


@cases.once("retrieve, input_items, input_tokens, delete")
def kept() -> str:
    made = responses.create(model=cases.MODEL, input="Hi")
    cases.check(responses.retrieve(made.id).output_text == cases.HELLO, made)
    items = list(responses.input_items.list(made.id))
    tokens = responses.input_tokens.count(model=cases.MODEL, input="Hi").input_tokens
    responses.delete(made.id)
    cases.expect(openai.NotFoundError, lambda: responses.retrieve(made.id))
    return f"{len(items)} item, {tokens} tokens"


@cases.once("a conversation")
def conversation() -> str:
    made = client.conversations.create(items=[{"role": "user", "content": "I am Ann."}])
    responses.create(model=cases.MODEL, input="Hi", conversation=made.id)
    kinds = [item.type for item in client.conversations.items.list(made.id, order="asc")]
    cases.check(kinds == ["message", "message", "reasoning", "message"], kinds)
    return ", ".join(kinds)


@cases.once("background: streamed, followed again, cancelled")
def background() -> str:
    stream = list(responses.create(model=cases.MODEL, input="Hi", background=True, stream=True))
    name = stream[0].response.id
    again = list(responses.retrieve(name, stream=True, starting_after=4))
    cases.check([one.sequence_number for one in again] == [*range(5, len(stream))], again)
    slow = responses.create(model=cases.MODEL, input=cases.SLOWLY, background=True)
    cases.leave(lambda: cases.check(responses.cancel(slow.id).status == "cancelled", slow))
    return f"{len(stream)} events, {len(again)} of them again"


def close_early() -> None:
    stream = responses.create(model=cases.MODEL, input=cases.SLOWLY, stream=True)
    next(iter(stream))
    stream.close()


def ask(question: str, key: str) -> object:
    return client_of(key).responses.create(model=cases.MODEL, input=question, stream=True)


cases.leaves("leaves a stream: the worker stops", close_early)
cases.meets_limits(
    "meets a rate limit and the end of the context",
    ask,
    openai.RateLimitError,
    openai.BadRequestError,
    lambda error: error.code,
)

if __name__ == "__main__":
    cases.main()
