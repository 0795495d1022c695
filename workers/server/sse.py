"""Server-sent events, the one framing of streamed answers."""

from __future__ import annotations

import json

from workers.server.ports import Json

DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def event(payload: Json) -> bytes:
    """Frame one JSON value."""
    return f"data: {_ENCODER.encode(payload)}\n\n".encode()
