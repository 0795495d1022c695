# /// script
# dependencies = ["openai-agents==0.24.0"]
# ///
"""The `openai-agents` package, on chat completions."""

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from bench.clients import cases
from bench.clients.schemas import Person

set_tracing_disabled(disabled=True)


def run(
    mode: cases.Mode, question: str, settings: dict[str, Any] | None = None, **fields: Any
) -> Any:
    async def ask() -> Any:
        async with AsyncOpenAI(base_url=cases.API, api_key="none") as client:
            agent: Any = Agent(
                name="Assistant",
                model=OpenAIChatCompletionsModel(cases.MODEL, client),
                model_settings=ModelSettings(
                    temperature=mode.temperature, max_tokens=300, **(settings or {})
                ),
                **fields,
            )
            if not mode.stream:
                return (await Runner.run(agent, question)).final_output
            result = Runner.run_streamed(agent, question)
            async for _ in result.stream_events():
                pass
            return result.final_output

    return asyncio.run(ask())


@cases.case("output_type: a pydantic model")
def structured(mode: cases.Mode) -> str:
    person = run(mode, cases.PERSON, output_type=Person)
    cases.check(isinstance(person, Person), person)
    return repr(person)


@cases.case("a tool, called and answered")
def tools(mode: cases.Mode) -> str:
    cities: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return "weather: sunny"

    text = run(mode, cases.WEATHER, tools=[get_weather])
    cases.check(cities or mode.temperature, text)
    return f"{cities} -> {text}"


@cases.case("tool_choice: required, its result is the output")
def required(mode: cases.Mode) -> str:
    @function_tool
    def store(city: Literal["Paris", "Rome"]) -> str:
        """Store a city."""
        return city

    city = run(
        mode,
        cases.PERSON,
        {"tool_choice": "required", "parallel_tool_calls": False},
        tools=[store],
        tool_use_behavior="stop_on_first_tool",
    )
    cases.check(city in ("Paris", "Rome"), city)
    return str(city)


if __name__ == "__main__":
    cases.main()
