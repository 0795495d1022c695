"""A worker that costs nothing: it answers every request with the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from workers.adapters.report import LaneReport, WorkerReport

MODEL = "canned"
EVENTS = 64
_USAGE = {"prompt_tokens": 8, "completion_tokens": EVENTS, "total_tokens": 8 + EVENTS}


def _event(**fields: object) -> bytes:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + json.dumps(chunk | fields).encode() + b"\n\n"


def _choice(reason: str | None, **delta: str) -> dict[str, object]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}


_WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * EVENTS},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    }
).encode()
_STREAM = [
    *(_event(choices=[_choice(None, content="word ")]) for _ in range(EVENTS)),
    _event(choices=[_choice("stop")]),
    _event(choices=[], usage=_USAGE),
    b"data: [DONE]\n\n",
]


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[WorkerReport]:
    """Serve on a free port; give the report with which it joins a gateway."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        lanes = tuple(LaneReport(name=name, slots=64) for name in ("text-mtp", "vlm"))
        yield WorkerReport(
            worker_id=MODEL,
            boot_id="1",
            url=f"http://127.0.0.1:{port}",
            model=MODEL,
            context_tokens=4096,
            lanes=lanes,
        )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if json.loads(body).get("stream"):
                await _write_stream(writer)
            else:
                _write_head(writer, b"application/json", b"content-length: %d" % len(_WHOLE))
                writer.write(_WHOLE)


async def _write_stream(writer: asyncio.StreamWriter) -> None:
    _write_head(writer, b"text/event-stream", b"transfer-encoding: chunked")
    for event in _STREAM:
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await asyncio.sleep(0)  # a packet for each event, as an engine writes them
    writer.write(b"0\r\n\r\n")


def _write_head(writer: asyncio.StreamWriter, content_type: bytes, framing: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + content_type + b"\r\n" + framing)
    writer.write(b"\r\n\r\n")
