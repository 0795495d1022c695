# /// script
# dependencies = ["openai-agents==0.24.0"]
# [tool.paceline]
# scripted = true
# ///
"""The `openai-agents` package: its model class of Responses, the default, and that of chat."""

from __future__ import annotations

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

from bench.clients.cases import (
    API,
    CALL,
    HELLO,
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
Wire = Callable[[str, openai.AsyncOpenAI], Any]
WIRES: dict[str, Wire] = {
    "Responses": OpenAIResponsesModel,
    "chat": OpenAIChatCompletionsModel,
}


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


def agent(wire: Wire, key: str = KEY, **fields: Any) -> Any:
    """Return an agent; the loop of each run needs one, because it has a client of its own."""
    client = openai.AsyncOpenAI(base_url=API, api_key=key, max_retries=0)
    return Agent(name="Assistant", model=wire(MODEL, client), **fields)


def run(
    wire: Wire,
    question: str,
    options: dict[str, Any] | None = None,
    *,
    key: str = KEY,
    **fields: Any,
) -> Any:
    """Run an agent with its tool to the end; the options are those of the run."""
    one = agent(wire, key, **{"tools": [get_weather], **fields})
    return asyncio.run(Runner.run(one, question, **(options or {})))


def answers(wire: Wire, _mode: Mode) -> str:
    text = run(wire, "Hi", tools=[]).final_output
    check(text == HELLO, text)
    return str(text)


def tools(wire: Wire, _mode: Mode) -> str:
    whole = run(wire, CALL).final_output

    async def stream() -> Any:
        result = Runner.run_streamed(agent(wire, tools=[get_weather]), CALL)
        async for _ in result.stream_events():
            pass
        return result

    streamed = asyncio.run(stream())
    check(whole == streamed.final_output == "The tool said: sunny in Paris", whole)
    cached = streamed.context_wrapper.usage.input_tokens_details.cached_tokens
    return f"{whole}; {cached} cached tokens"


def structured(wire: Wire, _mode: Mode) -> str:
    return repr(run(wire, WEATHER, tools=[], output_type=City).final_output)


def cancelled(wire: Wire, _mode: Mode) -> str:
    async def cancel() -> None:
        result = Runner.run_streamed(agent(wire), SLOWLY)
        async for event in result.stream_events():
            if event.type == "raw_response_event":  # the request has begun
                result.cancel()

    return leave(lambda: asyncio.run(cancel()))


def limited(wire: Wire, _mode: Mode) -> str:
    errors = limits(
        lambda question, key: run(wire, question, key=key),
        openai.RateLimitError,
        openai.BadRequestError,
    )
    return ", ".join(str(error.code) for error in errors)


for _name, _wire in WIRES.items():
    case(f"{_name}: answers", ONCE)(partial(answers, _wire))
    case(f"{_name}: a loop of tools, whole and streamed", ONCE)(partial(tools, _wire))
    case(f"{_name}: output_type, a pydantic model", ONCE)(partial(structured, _wire))
    case(f"{_name}: is cancelled: the worker stops", ONCE)(partial(cancelled, _wire))
    case(f"{_name}: meets a rate limit and the end of the context", ONCE)(partial(limited, _wire))


@case("Responses: goes on by previous_response_id", ONCE)
def goes_on(_mode: Mode) -> str:
    wire = WIRES["Responses"]
    first = run(wire, CALL)
    then = run(wire, "And now?", {"previous_response_id": first.last_response_id})
    alone = run(wire, CALL, {"auto_previous_response_id": True})
    check(then.final_output == alone.final_output == first.final_output, then.final_output)
    return str(then.final_output)


@case("Responses: stateless, with sealed reasoning", ONCE)
def stateless(_mode: Mode) -> str:
    settings = ModelSettings(
        store=False,
        reasoning=Reasoning(effort="low", summary="auto"),
        response_include=["reasoning.encrypted_content"],
    )
    return str(run(WIRES["Responses"], CALL, model_settings=settings).final_output)


if __name__ == "__main__":
    main()
