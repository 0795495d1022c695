# /// script
# dependencies = ["pydantic-ai-slim[anthropic,openai]==2.38.0", "anthropic==1.3.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `pydantic-ai` package on chat, Responses and Messages: one agent, three models.

This version of it does not work with `anthropic` 2.13.0, whose `BetaMessageParam` is a union.
"""

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

from bench.clients import cases
from bench.clients.schemas import City


def chat(key: str) -> Any:
    client = AsyncOpenAI(base_url=cases.API, api_key=key, max_retries=0)
    return OpenAIChatModel(cases.MODEL, provider=OpenAIProvider(openai_client=client))


def responses(key: str) -> Any:
    client = AsyncOpenAI(base_url=cases.API, api_key=key, max_retries=0)
    return OpenAIResponsesModel(cases.MODEL, provider=OpenAIProvider(openai_client=client))


def messages(key: str) -> Any:
    client = AsyncAnthropic(base_url=cases.URL, api_key=key, max_retries=0)
    return AnthropicModel(cases.MODEL, provider=AnthropicProvider(anthropic_client=client))


def agent(model: Any, key: str = cases.KEY, **fields: Any) -> Agent[None, Any]:
    return Agent(model(key), retries=0, **fields)


async def stream(one: Agent[None, Any], question: str) -> Any:
    async with one.run_stream(question) as result:
        return await result.get_output()


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def tools(model: Any) -> str:
    one = agent(model, tools=[get_weather])
    whole = asyncio.run(one.run(cases.CALL))
    streamed = asyncio.run(stream(agent(model, tools=[get_weather]), cases.CALL))
    cases.check(
        whole.output == streamed == "The tool said: sunny in Paris", (whole.output, streamed)
    )
    return f"{streamed}; {whole.usage.cache_read_tokens} cached tokens"


def ask(model: Any, question: str, key: str) -> None:
    asyncio.run(agent(model, key).run(question))


async def ask_slowly(model: Any) -> None:
    await stream(agent(model), cases.SLOWLY)


def structured(model: Any, output: Any) -> str:
    return repr(asyncio.run(agent(model, output_type=output).run("Hi")).output)


for _wire, _model in {"chat": chat, "Responses": responses, "Messages": messages}.items():
    cases.once(f"{_wire}: a loop of tools, whole and streamed", _model)(tools)
    cases.once(f"{_wire}: output_type, by a tool", _model, City)(structured)
    if _wire != "Messages":  # pydantic-ai knows of no Anthropic model but Anthropic's own that does
        cases.once(f"{_wire}: NativeOutput", _model, NativeOutput(City))(structured)
    cases.leaves(
        f"{_wire}: is cancelled: the worker stops",
        partial(cases.cancel, partial(ask_slowly, _model)),
    )
    cases.meets_limits(
        f"{_wire}: meets a rate limit and the end of the context",
        partial(ask, _model),
        ModelHTTPError,
        ModelHTTPError,
        lambda error: f"{error.status_code}: {error.body}",
    )

if __name__ == "__main__":
    cases.main()
