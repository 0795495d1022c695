# /// script
# dependencies = ["pydantic-ai-slim[anthropic,openai]==2.38.0", "anthropic==1.3.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `pydantic-ai` package on chat, Responses and Messages: one agent, three models.

This version of it does not work with `anthropic` 2.13.0, whose `BetaMessageParam` is a union.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from bench.clients.cases import (
    API,
    CALL,
    KEY,
    MODEL,
    ONCE,
    SLOWLY,
    URL,
    Mode,
    cancel,
    case,
    check,
    leave,
    limits,
    main,
)
from bench.clients.schemas import City


def chat(key: str) -> Any:
    client = AsyncOpenAI(base_url=API, api_key=key, max_retries=0)
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))


def responses(key: str) -> Any:
    client = AsyncOpenAI(base_url=API, api_key=key, max_retries=0)
    return OpenAIResponsesModel(MODEL, provider=OpenAIProvider(openai_client=client))


def messages(key: str) -> Any:
    client = AsyncAnthropic(base_url=URL, api_key=key, max_retries=0)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


def agent(model: Any, key: str = KEY, **fields: Any) -> Agent[None, Any]:
    return Agent(model(key), retries=0, **fields)


async def stream(one: Agent[None, Any], question: str) -> Any:
    async with one.run_stream(question) as result:
        return await result.get_output()


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def tools(model: Any, _mode: Mode) -> str:
    one = agent(model, tools=[get_weather])
    whole = asyncio.run(one.run(CALL))
    streamed = asyncio.run(stream(agent(model, tools=[get_weather]), CALL))
    check(whole.output == streamed == "The tool said: sunny in Paris", (whole.output, streamed))
    return f"{streamed}; {whole.usage.cache_read_tokens} cached tokens"


def structured(model: Any, output: Any, _mode: Mode) -> str:
    return repr(asyncio.run(agent(model, output_type=output).run("Hi")).output)


def cancelled(model: Any, _mode: Mode) -> str:
    return leave(lambda: cancel(lambda: stream(agent(model), SLOWLY)))


def limited(model: Any, _mode: Mode) -> str:
    def ask(question: str, key: str) -> object:
        return asyncio.run(agent(model, key).run(question))

    limit, full = limits(ask, ModelHTTPError, ModelHTTPError)
    check((limit.status_code, full.status_code) == (429, 400), (limit, full))
    return f"{limit.status_code}, {full.status_code}: {full.body}"


for _wire, _model in {"chat": chat, "Responses": responses, "Messages": messages}.items():
    case(f"{_wire}: a loop of tools, whole and streamed", ONCE)(partial(tools, _model))
    case(f"{_wire}: output_type, by a tool", ONCE)(partial(structured, _model, City))
    if _wire != "Messages":  # pydantic-ai knows of no Anthropic model but Anthropic's own that does
        case(f"{_wire}: NativeOutput", ONCE)(partial(structured, _model, NativeOutput(City)))
    case(f"{_wire}: is cancelled: the worker stops", ONCE)(partial(cancelled, _model))
    case(f"{_wire}: meets a rate limit and the end of the context", ONCE)(partial(limited, _model))

if __name__ == "__main__":
    main()
