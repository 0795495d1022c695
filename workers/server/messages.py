"""Chat messages of a body as a chat template wants them, and the pictures in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from policies.request.content import MEDIA_KINDS, source_of
from workers.server.errors import BadRequest
from workers.server.ports import Json

_CARRIED_FIELDS = ("name", "tool_call_id", "reasoning_content")


def read_messages(
    messages: Sequence[Mapping[str, Json]],
) -> tuple[list[dict[str, Json]], list[tuple[str, str]]]:
    """Return the messages for the template, and (field, URL) of each picture in order."""
    pictures: list[tuple[str, str]] = []
    rendered = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = "system" if message["role"] == "developer" else message["role"]
        turn: dict[str, Json] = {"role": role}
        turn["content"] = _read_content(message.get("content"), f"{where}.content", pictures)
        turn.update({name: message[name] for name in _CARRIED_FIELDS if message.get(name)})
        if message.get("tool_calls"):
            turn["tool_calls"] = _read_tool_calls(message["tool_calls"], f"{where}.tool_calls")
        rendered.append(turn)
    return rendered, pictures


def _read_content(content: Json, where: str, pictures: list[tuple[str, str]]) -> Json:
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Json]] = []
    for index, part in enumerate(content):
        if part["type"] not in MEDIA_KINDS:
            parts.append({"type": "text", "text": part["text"]})
            continue
        pictures.append(_read_picture(part, f"{where}[{index}]"))
        parts.append({"type": "image"})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_picture(part: Mapping[str, Json], where: str) -> tuple[str, str]:
    if MEDIA_KINDS[part["type"]] != "image":
        raise BadRequest(
            f"This worker takes no '{part['type']}' parts.",
            param=f"{where}.type",
            code="unsupported_value",
        )
    name, source = source_of(part)
    if source is None:
        raise BadRequest("A picture needs a 'data:' URL.", param=f"{where}.{name}")
    return f"{where}.{name}", source


def _read_tool_calls(calls: Json, where: str) -> list[dict[str, Json]]:
    if not isinstance(calls, list):
        raise BadRequest("'tool_calls' must be a list.", param=where)
    return [_read_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: Json, where: str) -> dict[str, Json]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("A tool call needs a function with a name.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # OpenAI carries arguments as JSON text; templates walk through them as a mapping.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise BadRequest(
            "The arguments of a tool call must be a JSON object.",
            param=f"{where}.function.arguments",
        )
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }
