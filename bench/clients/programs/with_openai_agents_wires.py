# /// script
# dependencies = ["openai-agents==0.24.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `openai-agents` package: its model class of Responses, the default, and that of chat."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai.types.shared import Reasoning

from bench.clients import cases
from bench.clients.schemas import City

set_tracing_disabled(disabled=True)
Wire = Callable[[str, openai.AsyncOpenAI], Any]
WIRES: dict[str, Wire] = {
    "Responses": OpenAIResponsesModel,
    "chat": OpenAIChatCompletionsModel,
}


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def agent(wire: Wire, key: str = cases.KEY, **fields: Any) -> Any:
    """Return an agent; the loop of each run needs one, because it has a client of its own."""
    client = openai.AsyncOpenAI(base_url=cases.API, api_key=key, max_retries=0)
    return Agent(name="Assistant", model=wire(cases.MODEL, client), **fields)


def run(
    wire: Wire,
    question: str,
    options: dict[str, Any] | None = None,
    *,
    key: str = cases.KEY,
    **fields: Any,
) -> Any:
    """Run an agent with its tool to the end; the options are those of the run."""
    one = agent(wire, key, **{"tools": [get_weather], **fields})
    return asyncio.run(Runner.run(one, question, **(options or {})))


def answers(wire: Wire) -> str:
    text = run(wire, "Hi", tools=[]).final_output
    cases.check(text == cases.HELLO, text)
    return str(text)


def tools(wire: Wire) -> str:
    whole = run(wire, cases.CALL).final_output

    async def stream() -> Any:
        result = Runner.run_streamed(agent(wire, tools=[get_weather]), cases.CALL)
        async for _ in result.stream_events():
            pass
        return result

    streamed = asyncio.run(stream())
    cases.check(whole == streamed.final_output == "The tool said: sunny in Paris", whole)
    cached = streamed.context_wrapper.usage.input_tokens_details.cached_tokens
    return f"{whole}; {cached} cached tokens"


def structured(wire: Wire) -> str:
    return repr(run(wire, cases.WEATHER, tools=[], output_type=City).final_output)


def ask(wire: Wire, question: str, key: str) -> None:
    run(wire, question, key=key)


def close_early(wire: Wire) -> None:
    async def cancel() -> None:
        result = Runner.run_streamed(agent(wire), cases.SLOWLY)
        async for event in result.stream_events():
            if event.type == "raw_response_event":  # the request has begun
                result.cancel()

    asyncio.run(cancel())


for _name, _wire in WIRES.items():
    cases.once(f"{_name}: answers", _wire)(answers)
    cases.once(f"{_name}: a loop of tools, whole and streamed", _wire)(tools)
    cases.once(f"{_name}: output_type, a pydantic model", _wire)(structured)
    cases.leaves(f"{_name}: is cancelled: the worker stops", partial(close_early, _wire))
    cases.meets_limits(
        f"{_name}: meets a rate limit and the end of the context",
        partial(ask, _wire),
        openai.RateLimitError,
        openai.BadRequestError,
        lambda error: error.code,
    )


@cases.once("Responses: goes on by previous_response_id")
def goes_on() -> str:
    wire = WIRES["Responses"]
    first = run(wire, cases.CALL)
    then = run(wire, "And now?", {"previous_response_id": first.last_response_id})
    alone = run(wire, cases.CALL, {"auto_previous_response_id": True})
    cases.check(then.final_output == alone.final_output == first.final_output, then.final_output)
    return str(then.final_output)


@cases.once("Responses: stateless, with sealed reasoning")
def stateless() -> str:
    settings = ModelSettings(
        store=False,
        reasoning=Reasoning(effort="low", summary="auto"),
        response_include=["reasoning.encrypted_content"],
    )
    return str(run(WIRES["Responses"], cases.CALL, model_settings=settings).final_output)


if __name__ == "__main__":
    cases.main()
