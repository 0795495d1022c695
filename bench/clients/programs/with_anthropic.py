# /// script
# dependencies = ["anthropic==2.13.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `anthropic` package, on Messages: whole, streamed, parsed, and its own loop of tools."""

from typing import Any

import anthropic

from bench.clients import cases
from bench.clients.schemas import City, unknown_fields

THINKING = {"type": "enabled", "budget_tokens": 1024}


def client_of(key: str = cases.KEY) -> Any:
    """Return a client that checks every answer strictly against the package's types."""
    return anthropic.Anthropic(
        base_url=cases.URL, api_key=key, max_retries=0, _strict_response_validation=True
    )


def fields(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": cases.MODEL, "max_tokens": 2000, "messages": messages, **more}


client = client_of()


@anthropic.beta_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@cases.once("create, stream")
def answers() -> str:
    whole = client.messages.create(**fields("Hi"))
    events = [*client.messages.create(**fields("Hi"), stream=True)]
    with client.messages.stream(**fields("Hi")) as stream:
        streamed = stream.get_final_message()
    cases.check(text_of(whole) == text_of(streamed) == cases.HELLO, (whole, streamed))
    unknown = unknown_fields(whole, streamed, *events)
    cases.check(not unknown, unknown)
    return f"the same, whole and in {len(events)} events; no field that its types lack"


@cases.once("parse")
def structured() -> str:
    whole = client.messages.parse(**fields("Hi"), output_format=City)
    cases.check(whole.parsed_output == City(city="Paris"), whole)
    return repr(whole.parsed_output)


@cases.once("tool_runner, whole and streamed, with thinking")
def tools() -> str:
    request = fields(cases.CALL, tools=[get_weather], thinking=THINKING)
    whole = [*client.beta.messages.tool_runner(**request)]
    kinds = [block.type for block in whole[0].content]
    cases.check(kinds == ["thinking", "tool_use"], kinds)
    streamed = None
    for stream in client.beta.messages.tool_runner(**request, stream=True):
        streamed = stream.get_final_message()
    cases.check(text_of(whole[-1]) == text_of(streamed), (whole, streamed))
    return f"{text_of(whole[-1])}; {whole[-1].usage.cache_read_input_tokens} cached tokens"


@cases.once("count_tokens, models")
def counts() -> str:
    request = fields("Hi")
    del request["max_tokens"]
    tokens = client.messages.count_tokens(**request).input_tokens
    models = [model.id for model in client.models.list()]
    cases.check(cases.MODEL in models, models)
    return f"{tokens} tokens; {', '.join(models)}"


def close_early() -> None:
    with client.messages.stream(**fields(cases.SLOWLY)) as stream:
        next(iter(stream.text_stream))


cases.leaves("leaves a stream: the worker stops", close_early)
cases.meets_limits(
    "meets a rate limit and the end of the context",
    lambda question, key: client_of(key).messages.create(**fields(question)),
    anthropic.RateLimitError,
    anthropic.BadRequestError,
    lambda error: f"{type(error).__name__}: {error.message}",
)

if __name__ == "__main__":
    cases.main()
