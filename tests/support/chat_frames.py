"""Chunks of a streamed chat, and the named events that a wire format makes of them."""

import json
from typing import Any


def chat_chunk(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": fields.pop("finish_reason", None)}
    return {"id": "chatcmpl-1", "model": "m", "choices": [choice], **fields}


def call_delta(index: int = 0, **function: Any) -> dict[str, Any]:
    """Return the delta of a call, which has an id with its name."""
    named = {"id": f"call{index}"} if "name" in function else {}
    return {"tool_calls": [{"index": index, "function": function, **named}]}


def named_events(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; the name of each is its type."""
    found = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
