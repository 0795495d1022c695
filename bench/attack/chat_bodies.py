"""Bodies of chat requests: plain ones that every model should accept, and changes of them."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from random import Random
from typing import Any, Final

from bench.attack.mutations import mutate

Body = dict[str, Any]

_PARAMETERS: Final = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of the city", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "default": None},
        "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "object", "properties": {"a": {}}}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
}
_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather",
        "parameters": _PARAMETERS,
        "strict": True,
    },
}
_NULLABLE: Final = {
    "type": "function",
    "function": {
        "name": "get_day",
        "description": "Return the day",
        "parameters": {"type": "object", "properties": {"at": {"type": ["string", "null"]}}},
    },
}
_CLOCK: Final = {"type": "function", "function": {"name": "get_time"}}
_EMPTY: Final = {
    "type": "function",
    "function": {"name": "stop", "description": None, "parameters": {}},
}
_SYSTEM: Final = {"role": "system", "content": "Be brief."}
_USER: Final = {"role": "user", "content": "Weather in Rome?"}
_ANSWER: Final = {"role": "assistant", "content": "Sunny."}
_NEXT: Final = {"role": "user", "content": "And in Oslo?"}


def _call(arguments: str = '{"city": "Rome", "days": 2}', number: int = 1) -> dict[str, Any]:
    # Mistral's templates accept ids of nine letters and digits alone.
    return {
        "id": f"call0000{number}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def _result(number: int = 1, content: Any = '{"degrees": 21}') -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def _calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [*calls], **fields}


def _text(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


_CONVERSATIONS: Final[Mapping[str, list[Any]]] = {
    "one turn": [_USER],
    "several turns": [_USER, _ANSWER, _NEXT],
    "a system message": [_SYSTEM, _USER, _ANSWER, _NEXT],
    "a developer message": [{"role": "developer", "content": "Be brief."}, _USER],
    "a system message within": [_USER, _ANSWER, _SYSTEM, _NEXT],
    "two users in a row": [_USER, _NEXT],
    "text parts": [
        {"role": "system", "content": _text("Be brief.")},
        {"role": "user", "content": _text("Weather?")},
        {"role": "assistant", "content": _text("Sunny.")},
        {"role": "user", "content": _text("And") + _text(" Oslo?")},
    ],
    "users in a row, one in parts": [_USER, {"role": "user", "content": _text("And Oslo?")}],
    "reasoning_content": [_USER, {**_ANSWER, "reasoning_content": "It is summer."}, _NEXT],
    "a named user": [{**_USER, "name": "ann"}],
    "a named user beside another": [{**_USER, "name": "ann"}, {**_NEXT, "name": "bob"}],
    "nulls of a client library": [
        _USER,
        {**_ANSWER, "refusal": None, "audio": None, "function_call": None, "tool_calls": None},
        _NEXT,
    ],
    "no user": [_SYSTEM],
    "an assistant first": [_ANSWER, _USER],
    "an assistant last": [_USER, {"role": "assistant", "content": "It is"}],
    "an empty answer": [_USER, {"role": "assistant", "content": ""}, _NEXT],
}
_CALLS: Final[Mapping[str, list[Any]]] = {
    "tools": [_USER],
    "tools and a system message": [_SYSTEM, _USER],
    "a call and its result": [_USER, _calling(_call()), _result()],
    "a call after a system message": [_SYSTEM, _USER, _calling(_call()), _result()],
    "a turn after a call": [_USER, _calling(_call()), _result(), _ANSWER, _NEXT],
    "a user after a result": [_USER, _calling(_call()), _result(), _NEXT],
    "parallel calls": [_USER, _calling(_call(), _call(number=2)), _result(), _result(2)],
    "calls in a row": [_USER, _calling(_call()), _result(), _calling(_call(number=2)), _result(2)],
    "a call with text": [_USER, _calling(_call(), content="I look."), _result()],
    "a call with empty text": [_USER, _calling(_call(), content=""), _result()],
    "a call with reasoning": [_USER, _calling(_call(), reasoning_content="Look."), _result()],
    "a call without arguments": [_USER, _calling(_call("")), _result()],
    "a result in parts": [_USER, _calling(_call()), _result(content=_text("21"))],
    "an empty result": [_USER, _calling(_call()), _result(content="")],
    "a call of a client library": [
        _USER,
        _calling({**_call(), "index": 0}, refusal=None, audio=None, annotations=[]),
        _result(),
    ],
    "an OpenAI id": [
        _USER,
        _calling({**_call(), "id": "call_Ab12Cd34Ef56Gh78Ij90Kl12"}),
        {**_result(), "tool_call_id": "call_Ab12Cd34Ef56Gh78Ij90Kl12"},
    ],
}


def plain_bodies() -> dict[str, Body]:
    """Return valid bodies as OpenAI's clients send them, by name."""
    tools = [_WEATHER, _CLOCK, _EMPTY]
    history = _CALLS["a turn after a call"]
    return {
        **{name: {"messages": messages} for name, messages in _CONVERSATIONS.items()},
        **{name: {"messages": messages, "tools": tools} for name, messages in _CALLS.items()},
        "a nullable parameter": {"messages": [_USER], "tools": [_NULLABLE]},
        "calls, and no tools": {"messages": history},
        "calls, and tool_choice none": {
            "messages": history,
            "tools": tools,
            "tool_choice": "none",
        },
    }


_ODD: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        -5,
        0,
        3,
        1e308,
        -0.0,
        0.1,
        10**18,
        2**64,
        10**400,
        [],
        {},
        [[]],
        {"a": {"b": []}},
    ),
    *('{"a":' * 900 + "1" + "}" * 900, '{"a":' * 20_000, '{"a": [1', "none", "auto", "call00001"),
    *("", " ", "\n", "Hello", "{{ 7 * 7 }}", "{% for x in y %}", "<think>", "</think>", "null"),
    *("<|im_start|>", "<|im_end|>\n<|im_start|>system", "[INST]", "</s>", "<tool_call>", "\x00"),
    *("é", "日本語", "👩‍👩‍👧", "\u202e", "\ufdd0", "\U0010ffff", "\ud800", "a" * 500, "%s %d {0}"),
)


def random_body(rng: Random) -> Body:
    """Return a plain body with one to three odd values, in any place."""
    body = deepcopy(rng.choice([*plain_bodies().values()]))
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5}
    mutate(body, rng, _ODD, changes=(1, 2, 3))
    return body
