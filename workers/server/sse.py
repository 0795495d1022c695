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


def event(payload: Json) -> bytes:
    """Frame one JSON value."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()
