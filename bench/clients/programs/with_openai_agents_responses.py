# /// script
# dependencies = ["openai-agents==0.24.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `openai-agents` package with its default model class, which speaks Responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai.types.shared import Reasoning

from bench.clients.cases import (
    API,
    CALL,
    KEY,
    MODEL,
    ONCE,
    SLOWLY,
    WEATHER,
    Mode,
    case,
    check,
    leave,
    limits,
    main,
)
from bench.clients.schemas import City

set_tracing_disabled(disabled=True)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def use(key: str = KEY) -> openai.AsyncOpenAI:
    """Let all agents use this key; the loop of each run needs a client of its own."""
    client = openai.AsyncOpenAI(base_url=API, api_key=key, max_retries=0)
    set_default_openai_client(client)
    return client


def run(question: str, *, key: str = KEY, agent: Any = None, **options: Any) -> Any:
    use(key)
    agent = agent or Agent(name="Assistant", model=MODEL, tools=[get_weather])
    return asyncio.run(Runner.run(agent, question, **options))


@case("a loop of tools, whole and streamed", ONCE)
def tools(_mode: Mode) -> str:
    whole = run(CALL).final_output

    async def stream() -> Any:
        use()
        result = Runner.run_streamed(
            Agent(name="Assistant", model=MODEL, tools=[get_weather]), CALL
        )
        async for _ in result.stream_events():
            pass
        return result

    streamed = asyncio.run(stream())
    check(whole == streamed.final_output == "The tool said: sunny in Paris", whole)
    cached = streamed.context_wrapper.usage.input_tokens_details.cached_tokens
    return f"{whole}; {cached} cached tokens"


@case("goes on by previous_response_id", ONCE)
def goes_on(_mode: Mode) -> str:
    first = run(CALL)
    then = run("And now?", previous_response_id=first.last_response_id)
    alone = run(CALL, auto_previous_response_id=True)
    check(then.final_output == alone.final_output == first.final_output, then.final_output)
    return str(then.final_output)


@case("stateless, with sealed reasoning", ONCE)
def stateless(_mode: Mode) -> str:
    settings = ModelSettings(
        store=False,
        reasoning=Reasoning(effort="low", summary="auto"),
        response_include=["reasoning.encrypted_content"],
    )
    agent = Agent(name="Assistant", model=MODEL, model_settings=settings, tools=[get_weather])
    return str(run(CALL, agent=agent).final_output)


@case("output_type: a pydantic model", ONCE)
def structured(_mode: Mode) -> str:
    agent = Agent(name="Assistant", model=MODEL, output_type=City)
    return repr(run(WEATHER, agent=agent).final_output)


@case("is cancelled: the worker stops", ONCE)
def cancelled(_mode: Mode) -> str:
    async def cancel() -> None:
        async with use():
            result = Runner.run_streamed(Agent(name="Assistant", model=MODEL), SLOWLY)
            async for event in result.stream_events():
                if event.type == "raw_response_event":  # the request has begun
                    result.cancel()

    return leave(lambda: asyncio.run(cancel()))


@case("meets a rate limit and the end of the context", ONCE)
def limited(_mode: Mode) -> str:
    errors = limits(
        lambda question, key: run(question, key=key), openai.RateLimitError, openai.BadRequestError
    )
    return ", ".join(str(error.code) for error in errors)


if __name__ == "__main__":
    main()
