# /// script
# dependencies = ["pydantic-ai-slim[openai]==2.38.0"]
# ///
"""The `pydantic-ai` package: its three ways to a pydantic model, and its loop of tools."""

import asyncio
from functools import partial
from typing import Any

from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from bench.clients import cases
from bench.clients.schemas import Anything, Person


def agent(mode: cases.Mode, output: Any) -> Agent[None, Any]:
    model = OpenAIChatModel(
        cases.MODEL, provider=OpenAIProvider(base_url=cases.API, api_key="none")
    )
    settings: Any = {"temperature": mode.temperature, "max_tokens": 300}
    return Agent(model, output_type=output, model_settings=settings, retries=0)


async def ask(one: Agent[None, Any], question: str, mode: cases.Mode) -> Any:
    if not mode.stream:
        return (await one.run(question)).output
    async with one.run_stream(question) as stream:
        return await stream.get_output()


def extract(output: Any, mode: cases.Mode) -> str:
    person = asyncio.run(ask(agent(mode, output), cases.PERSON, mode))
    cases.check(isinstance(person, Person | Anything), person)
    return repr(person)[:60]


cases.case("output_type: by a tool")(partial(extract, Person))
cases.case("output_type: NativeOutput")(partial(extract, NativeOutput(Person)))
# The schema is in the prompt alone, which the demo model does not understand.
cases.case("output_type: PromptedOutput", cases.GREEDY)(partial(extract, PromptedOutput(Anything)))


@cases.case("a tool, called and answered")
def tools(mode: cases.Mode) -> str:
    one, cities = agent(mode, str), []

    @one.tool_plain(strict=True)
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        cities.append(city)
        return "weather: sunny"

    text = asyncio.run(ask(one, cases.WEATHER, mode))
    cases.check(cities or mode.temperature, text)
    return f"{cities} -> {text}"


if __name__ == "__main__":
    cases.main()
