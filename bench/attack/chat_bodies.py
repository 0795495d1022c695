"""Bodies of chat requests: plain ones that every model should accept, and random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

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


_TEXTS: Final = (
    *("", " ", "\n", "Hello", "{{ 7 * 7 }}", "{% for x in y %}", "<think>", "</think>", "null"),
    *("<|im_start|>", "<|im_end|>\n<|im_start|>system", "[INST]", "</s>", "<tool_call>", "\x00"),
    *("é", "日本語", "👩‍👩‍👧", "\u202e", "\ufdd0", "\U0010ffff", "\ud800", "a" * 500, "%s %d {0}"),
)
_NAMES: Final = (
    *("name", "type", "description", "properties", "items", "required", "enum", "content", "text"),
    *("a", "", "__class__", "$ref", "anyOf", "parameters", "id", "default", "additionalProperties"),
)


def random_body(rng: random.Random) -> Body:
    """Return a body that is nearly valid, with odd values in any place."""
    messages = [_message(rng) for _ in range(rng.choice((1, 1, 2, 3, 4, 6)))]
    body: Body = {"messages": messages}
    if rng.random() < 0.6:
        body["tools"] = _odd(rng, lambda: [_tool(rng) for _ in range(rng.randrange(4))])
    if rng.random() < 0.1:
        body["tool_choice"] = rng.choice(("none", "auto", None))
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = _odd(rng, lambda: {"enable_thinking": rng.random() < 0.5})
    return body


def _odd(rng: random.Random, value: Callable[[], Any], chance: float = 0.04) -> Any:
    """Return a proper value, or at times any other."""
    return _json(rng) if rng.random() < chance else value()


def _json(rng: random.Random, levels: int = 4) -> Any:
    kind = rng.randrange(12 if levels else 8)
    if kind >= 10:
        return {_name(rng): _json(rng, levels - 1) for _ in range(rng.randrange(4))}
    if kind >= 8:
        return [_json(rng, levels - 1) for _ in range(rng.randrange(4))]
    return (
        None,
        rng.random() < 0.5,
        rng.randrange(-5, 5),
        rng.choice((1e308, -0.0, 0.1, 10**18, 2**64, 10**400)),
        *(rng.choice(_TEXTS) for _ in range(4)),
    )[kind]


def _name(rng: random.Random) -> str:
    return rng.choice(_NAMES if rng.random() < 0.8 else _TEXTS)


def _texts(rng: random.Random) -> str:
    return "".join(rng.choice(_TEXTS[:-3]) for _ in range(rng.randrange(1, 4)))


def _message(rng: random.Random) -> Any:
    text = partial(_texts, rng)
    role = rng.choice(("user", "user", "assistant", "assistant", "tool", "system", "developer"))
    message: dict[str, Any] = {"role": _odd(rng, lambda: role, 0.01)}
    if rng.random() < 0.97:
        message["content"] = _odd(rng, lambda: _content(rng))
    if role == "assistant" and rng.random() < 0.5:
        message["tool_calls"] = _odd(rng, lambda: [_random_call(rng) for _ in range(3)])
        message["content"] = rng.choice((None, "", text()))
    if role == "tool":
        message["tool_call_id"] = _odd(rng, lambda: rng.choice(("call00001", text())))
    for name in ("name", "reasoning_content"):
        if rng.random() < 0.1:
            message[name] = _odd(rng, text)
    if rng.random() < 0.1:
        message[_name(rng)] = _json(rng)
    return _odd(rng, lambda: message, 0.005)


def _content(rng: random.Random) -> Any:
    if rng.random() < 0.7:
        return _texts(rng)
    parts: list[Any] = []
    for _ in range(rng.randrange(4)):
        part = {
            "type": rng.choice(("text", "text", "input_text", "output_text")),
            "text": _odd(rng, partial(_texts, rng)),
        }
        parts.append(_json(rng) if rng.random() < 0.04 else part)
    return parts


def _random_call(rng: random.Random) -> Any:
    function = {
        "name": _odd(rng, lambda: rng.choice(("get_weather", _texts(rng)))),
        "arguments": _odd(rng, lambda: _arguments(rng)),
    }
    call = {"id": _odd(rng, lambda: "call00001"), "type": "function", "function": function}
    return _odd(rng, lambda: call, 0.01)


def _arguments(rng: random.Random) -> Any:
    given = {_name(rng): _json(rng) for _ in range(rng.randrange(4))}
    nested = {"a": "[" * rng.choice((5, 100, 150)) + "]"}
    return rng.choice(
        (json.dumps(given), json.dumps(given), given, "", "{", json.dumps(nested), _deep(rng))
    )


def _deep(rng: random.Random) -> str:
    levels = rng.choice((20, 190, 900, 20_000))
    return '{"a":' * levels + "1" + "}" * levels


def _tool(rng: random.Random) -> Any:
    function: dict[str, Any] = {"name": _odd(rng, lambda: rng.choice(("f", _texts(rng))), 0.01)}
    if rng.random() < 0.8:
        function["description"] = _odd(rng, partial(_texts, rng), 0.02)
    if rng.random() < 0.8:
        function["parameters"] = _odd(rng, lambda: _schema(rng), 0.02)
    for extra in ("strict", "return", "response", _name(rng)):
        if rng.random() < 0.1:
            function[extra] = _json(rng)
    tool = {"type": _odd(rng, lambda: "function"), "function": function}
    if rng.random() < 0.1:
        tool[_name(rng)] = _json(rng)
    return _odd(rng, lambda: tool, 0.005)


def _schema(rng: random.Random, levels: int = 4) -> Any:
    kinds = ("object", "object", "string", "integer", "array", "null", "boolean", "number")
    schema: dict[str, Any] = {"type": _odd(rng, lambda: rng.choice(kinds))}
    if levels and schema["type"] == "object":
        properties = {_name(rng): _schema(rng, levels - 1) for _ in range(rng.randrange(4))}
        schema["properties"] = _odd(rng, lambda: properties)
        schema["required"] = _odd(rng, lambda: list(properties)[:2])
    if levels and schema["type"] == "array":
        schema["items"] = _odd(rng, lambda: _schema(rng, levels - 1))
    for name in ("description", "enum", "default", "anyOf", "$ref", "additionalProperties"):
        if rng.random() < 0.12:
            schema[name] = _json(rng)
    return _odd(rng, lambda: schema, 0.02)
