# /// script
# dependencies = ["openai==3.57.0"]
# ///
"""The `openai` package."""

import json
from typing import Any

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from bench.clients import cases
from bench.clients.schemas import Person, unknown_fields

client: Any = OpenAI(base_url=cases.API, api_key="none", _strict_response_validation=True)
chat: Any = client.chat.completions


class GetWeather(BaseModel):
    """Get the weather of a city."""

    city: str = Field(max_length=20)


class Now(BaseModel):
    """Get the time."""


TOOL: Any = {**openai.pydantic_function_tool(GetWeather, name="get_weather")}
TOOLS = [TOOL, openai.pydantic_function_tool(Now, name="now")]


def fields(question: str, mode: cases.Mode, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": cases.MODEL, "messages": messages, "temperature": mode.temperature, **more}


def finish(mode: cases.Mode, request: dict[str, Any]) -> Any:
    """Return the choice of a whole answer, or of the final one of the package's stream."""
    if not mode.stream:
        return chat.parse(**request).choices[0]
    with chat.stream(**request) as stream:
        return stream.get_final_completion().choices[0]


@cases.case("chat, with the counts of its drafts")
def text(mode: cases.Mode) -> str:
    request = fields(cases.COUNT, mode, max_tokens=200)
    if not mode.stream:
        received = [chat.create(**request)]
        content = received[0].choices[0].message.content
    else:
        options = {"include_usage": True}
        received = [*chat.create(**request, stream=True, stream_options=options)]
        deltas = [choice.delta for chunk in received for choice in chunk.choices]
        content = "".join(delta.content or "" for delta in deltas)
    cases.check(content, "empty")
    unknown = unknown_fields(*received)
    cases.check(unknown <= {"ChatCompletion.metrics", "ChatCompletionChunk.metrics"}, unknown)
    if mode.temperature:
        return "text"
    cases.check("1, 2, 3" in content, content)
    counts = received[-1].metrics["speculative_decoding"]
    return f"{counts['draft_acceptance_rate']:.0%} of drafts accepted"


@cases.case("parse: a pydantic model as the form of the answer")
def parse(mode: cases.Mode) -> str:
    return repr(finish(mode, fields(cases.PERSON, mode, response_format=Person)).message.parsed)


@cases.case("response_format: json_object")
def json_object(mode: cases.Mode) -> str:
    request = fields(cases.PERSON, mode, response_format={"type": "json_object"}, max_tokens=400)
    try:
        choice = finish(mode, request)
    except openai.LengthFinishReasonError:  # nothing bounds the object
        return "cut by length"
    return f"an object of {len(json.loads(choice.message.content))} members"


@cases.case("tool_choice: required, strict tools")
def required(mode: cases.Mode) -> str:
    calls = finish(
        mode, fields(cases.PERSON, mode, tools=TOOLS, tool_choice="required")
    ).message.tool_calls
    cases.check(calls, "no call")
    return " ".join(repr(call.function.parsed_arguments) for call in calls[:2])


@cases.case("tool_choice: a named tool")
def named(mode: cases.Mode) -> str:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    call = finish(
        mode, fields(cases.COUNT, mode, tools=TOOLS, tool_choice=choice)
    ).message.tool_calls[0]
    cases.check(isinstance(call.function.parsed_arguments, GetWeather), call)
    return str(call.function.parsed_arguments)


@cases.case("tool_choice: allowed_tools, of which one is required")
def allowed(mode: cases.Mode) -> str:
    reference = {"type": "function", "function": {"name": "get_weather"}}
    some = {"mode": "required", "tools": [reference]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    calls = finish(
        mode, fields(cases.PERSON, mode, tools=TOOLS, tool_choice=choice)
    ).message.tool_calls
    names = {call.function.name for call in calls}
    cases.check(names == {"get_weather"}, names)
    return " ".join(names)


@cases.case("tools, called and answered")
def tools(mode: cases.Mode) -> str:
    request = fields(cases.WEATHER, mode, tools=[TOOL])
    message = finish(mode, request).message
    if not message.tool_calls and mode.temperature:
        return "text"
    call = message.tool_calls[0]
    cases.check(isinstance(call.function.parsed_arguments, GetWeather), call)
    request["messages"] += [
        {
            "role": "assistant",
            "content": message.content,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "weather: sunny"},
    ]
    return f"{call.function.arguments} -> {finish(mode, request).message.content}"


@cases.case("legacy functions, called and answered")
def functions(mode: cases.Mode) -> str:
    function = {"name": "get_weather", "parameters": TOOL["function"]["parameters"]}
    request = fields(
        cases.WEATHER, mode, functions=[function], function_call={"name": "get_weather"}
    )
    if mode.stream:
        name, arguments, reason = "", "", ""
        for chunk in chat.create(**request, stream=True):
            call = chunk.choices[0].delta.function_call
            name += (call and call.name) or ""
            arguments += (call and call.arguments) or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        choice = chat.create(**request).choices[0]
        call, reason = choice.message.function_call, choice.finish_reason
        name, arguments = call.name, call.arguments
    cases.check(
        (name, reason) in (("get_weather", "stop"), ("get_weather", "function_call")), reason
    )
    called = {"name": name, "arguments": arguments}
    request["messages"] += [
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": name, "content": "weather: sunny"},
    ]
    request["function_call"] = "none"
    cases.check(chat.create(**request).choices[0].message.content is not None, "no answer")
    return arguments


@cases.case(
    "fields of other models: reasoning_effort, verbosity, modalities, prediction, store",
    cases.WHOLE,
)
def hints(mode: cases.Mode) -> str:
    raw = chat.with_raw_response.create(
        **fields(cases.COUNT, mode, max_tokens=5),
        reasoning_effort="low",
        verbosity="low",
        modalities=["text"],
        prediction={"type": "content", "content": "1, 2"},
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
    )
    return f"x-paceline-ignored: {raw.headers['x-paceline-ignored']}"


@cases.once("completions: two prompts, echo and logprobs")
def completions() -> str:
    # The first token has no log-probability, which the package's types leave out.
    lenient: Any = OpenAI(base_url=cases.API, api_key="none")
    answer = lenient.completions.create(
        model=cases.MODEL, prompt=["One", "Two"], echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    cases.check([one.text for one in answer.choices] == ["One", "Two"], answer)
    return f"{sum(len(one.logprobs.tokens) for one in answer.choices)} scored tokens"


@cases.once("a conversation that is too long")
def overflow() -> str:
    error = cases.expect(
        openai.BadRequestError, lambda: chat.create(**fields(cases.OVERFLOW, cases.WHOLE[0]))
    )
    cases.check(error.code == "context_length_exceeded", error)
    return f"BadRequestError, {error.code}"


if __name__ == "__main__":
    cases.main()
