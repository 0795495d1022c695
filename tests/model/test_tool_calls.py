"""Tool calls of the demo model through a gateway: alone, eight at once, streamed and cut."""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI, OpenAI

from tests.support.chat_bodies import WEATHER

TOOLS: Any = [{"type": "function", "function": WEATHER}]
CITIES = ("Paris", "London", "Berlin", "Madrid")


def fields_of(index: int, **fields: Any) -> Any:
    return {
        "model": "demo",
        "messages": [
            {"role": "user", "content": f"What is the weather in {CITIES[index % len(CITIES)]}?"}
        ],
        "tools": TOOLS,
        "temperature": index // 4,
        "seed": index,
        **fields,
    }


async def whole(client: AsyncOpenAI, index: int) -> Any:
    answer = await client.chat.completions.create(**fields_of(index))
    message = answer.choices[0].message.model_dump()
    calls = [call["function"] for call in message["tool_calls"] or []]
    return answer.choices[0].finish_reason, message["content"] or "", calls


async def streamed(client: AsyncOpenAI, index: int) -> Any:
    calls: list[Any] = []
    finish, content, deltas = None, "", 0
    async for chunk in await client.chat.completions.create(**fields_of(index, stream=True)):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.function.name:
                assert call.index == len(calls)
                calls.append({"name": call.function.name, "arguments": ""})
            deltas += bool(call.function.arguments)
            calls[call.index]["arguments"] += call.function.arguments or ""
    assert deltas >= 2 * len(calls), "arguments arrive in parts"
    return finish, content, calls


async def test_eight_calls_at_once_are_the_same_whole_and_streamed(async_openai_client) -> None:
    """Half of them greedy and half sampled; each is the call that the request gets alone."""
    client, rows = async_openai_client, range(8)
    together = await asyncio.gather(*(streamed(client, index) for index in rows))
    assert together == await asyncio.gather(*(whole(client, index) for index in rows))
    assert together == [await whole(client, index) for index in rows]
    for index, (finish, content, calls) in enumerate(together[:4]):
        assert (finish, content) == ("tool_calls", "")
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("get_weather", {"city": CITIES[index]})
        ]


def test_a_call_cut_at_any_token_leaves_no_markup(openai_client: OpenAI) -> None:
    """Its arguments end where they are, and the limit is the reason of its end."""
    arguments = set()
    for limit in range(1, 100):
        answer = openai_client.chat.completions.create(**fields_of(0, max_tokens=limit))
        choice = answer.choices[0]
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"
        assert not choice.message.content
        arguments |= {
            call["function"]["arguments"]
            for call in choice.message.model_dump()["tool_calls"] or []
        }
    assert choice.finish_reason == "tool_calls"
    assert {"", '{"city": "'} <= arguments


def test_a_cut_call_has_the_same_pieces_at_each_wire(openai_client: OpenAI) -> None:
    function = TOOLS[0]["function"]
    asked: Any = {"model": "demo", "temperature": 0, "input": "What is the weather in Paris?"}
    flat: Any = {"type": "function", **function}
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    for limit in range(1, 100, 3):
        message = openai_client.chat.completions.create(**fields_of(0, max_tokens=limit))
        calls: Any = message.choices[0].message.tool_calls
        arguments = calls[0].function.arguments if calls else None
        response = openai_client.responses.create(**asked, tools=[flat], max_output_tokens=limit)
        items = [one for one in response.output if one.type == "function_call"]
        assert [one.arguments for one in items] == ([] if arguments is None else [arguments])
        ended = message.choices[0].finish_reason == "tool_calls"
        assert response.status == ("completed" if ended else "incomplete")
        body = {"model": "demo", "temperature": 0, "max_tokens": limit, "tools": [tool]}
        body["messages"] = [{"role": "user", "content": asked["input"]}]
        answer = openai_client.post("/messages", cast_to=dict[str, Any], body=body)
        blocks = [one["input"] for one in answer["content"] if one["type"] == "tool_use"]
        whole = (arguments or "").endswith("}")
        assert blocks == ([json.loads(arguments or "")] if whole else [])
        assert answer["stop_reason"] == ("tool_use" if ended else "max_tokens")
        if ended:
            break
    assert ended


def test_the_model_calls_allowed_tools_alone_and_its_prompt_stays_the_same(openai_client) -> None:
    """The grammar lets it begin no call of another tool, however it samples."""
    stop = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
    prompts: set[int] = set()
    called: list[str] = []
    for mode in ("auto", "required"):
        for name in ("stop", "get_weather"):
            allowed = [{"type": "function", "function": {"name": name}}]
            choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
            for index in (0, 1, 5):
                given = {"tools": [*TOOLS, stop], "tool_choice": choice, "max_tokens": 60}
                answer = openai_client.chat.completions.create(**fields_of(index % 4, **given))
                names = {one.function.name for one in answer.choices[0].message.tool_calls or ()}
                assert names <= {name}
                called += names
                prompts |= {answer.usage.prompt_tokens} if index == 0 else set()
    assert {*called} == {"stop", "get_weather"}
    assert len(prompts) == 1
