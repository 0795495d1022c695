"""A worker that does what a test tells it, behind a real socket and a real uvicorn."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from workers.adapters.report import LaneReport, Speculation, WorkerReport

TOKEN = "join-token-of-the-tests"

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}
METRICS = {"speculative_decoding": {"num_spec_tokens": 2, "num_spec_steps": 1}}


@dataclass(kw_only=True)
class Script:
    """How the next answers go."""

    status: int = 200
    body: bytes | None = None
    """Sent as it is in place of an answer."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    words: tuple[str, ...] = ("one", " two", " three")
    cut_after: int | None = None
    """Break the connection after so many stream events, without an end."""
    end_after: int | None = None
    """End the answer cleanly after so many stream events, as a dead HTTP/1.0 worker seems to."""
    hang_after: int | None = None
    """Say nothing more after so many stream events, until the client leaves or `go_on` is set."""
    hang: bool = False
    """Say nothing at all."""
    events: tuple[bytes, ...] | None = None
    """Stream exactly these pieces."""


@dataclass
class Heard:
    """One request as the worker got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeWorker:
    """A worker with two lanes of four rows. Use its context manager `joined` or `serving`."""

    worker_id: str = "fake-a"
    boot_id: str = "boot-1"
    model: str = "demo"
    lanes: tuple[str, ...] = ("text-mtp", "vlm")
    script: Script = field(default_factory=Script)
    heard: list[Heard] = field(default_factory=list)
    hearing: threading.Event = field(default_factory=threading.Event)
    """Set with every request."""
    client_left: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    reported: WorkerReport | None = None
    """Given out by /v1/status; None answers with `report()`."""

    def __post_init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def report(self, **changes: Any) -> WorkerReport:
        report = WorkerReport(
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            url=self.url,
            model=self.model,
            context_tokens=4096,
            lanes=tuple(lane_report(name) for name in self.lanes),
        )
        return WorkerReport.model_validate({**report.model_dump(), **changes})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if scope["path"] == "/v1/status":
            report = self.reported or self.report()
            await _whole(send, 200, json.dumps({"report": report.model_dump(mode="json")}).encode())
            return
        body = json.loads(await _body(receive))
        self.heard.append(Heard(scope["path"], headers, body))
        self.hearing.set()
        leaving = asyncio.create_task(_wait_for_leaving(receive, self.client_left.set))
        try:
            await self._answer(body, send)
        finally:
            leaving.cancel()

    async def _answer(self, body: dict[str, Any], send: Any) -> None:
        script = self.script
        if script.hang:
            await self._hang()
        if script.body is not None or script.status != 200:
            await _whole(send, script.status, script.body or b"{}", script.headers)
        elif body.get("stream"):
            await self._stream(send, script)
        else:
            await _whole(send, 200, json.dumps(whole_answer("".join(script.words))).encode())

    async def _stream(self, send: Any, script: Script) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        pieces = script.events if script.events is not None else stream_events(script.words)
        for sent, piece in enumerate([*pieces, None]):
            if script.hang_after == sent:
                await self._hang()
            if script.cut_after == sent:
                raise ConnectionAbortedError("the script says so")
            if script.end_after == sent or piece is None:
                break
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def _hang(self) -> None:
        while not (self.client_left.is_set() or self.go_on.is_set()):
            await asyncio.sleep(0.005)


def lane_report(name: str, **changes: Any) -> LaneReport:
    speculates = name == "text-mtp"
    lane = LaneReport(
        name=name,
        slots=4,
        mtp_enabled=speculates,
        requested_draft_tokens=2 if speculates else 0,
        effective_draft_tokens=2 if speculates else 0,
    )
    return LaneReport.model_validate({**lane.model_dump(), **changes})


def speculation(*, steps: int, one: int, two: int) -> Speculation:
    """Counts at k = 2 of so many steps, of which `one` accepted one token and `two` both."""
    return Speculation(
        num_spec_tokens=2,
        steps=steps,
        drafted=2 * steps,
        accepted=one + 2 * two,
        histogram=(steps - one - two, one, two),
    )


def whole_answer(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": USAGE,
        "metrics": METRICS,
    }


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
        | {"choices": [choice], "usage": None}
    )


def event(frame: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


def usage_chunk() -> bytes:
    frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo"}
    return event(frame | {"choices": [], "usage": USAGE, "metrics": METRICS})


DONE = b"data: [DONE]\n\n"


def stream_events(words: Iterable[str]) -> tuple[bytes, ...]:
    return (
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": word}) for word in words),
        chunk({}, "stop"),
        usage_chunk(),
        DONE,
    )


async def _body(receive: Any) -> bytes:
    parts = bytearray()
    while True:
        message = await receive()
        parts += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(parts)


async def _wait_for_leaving(receive: Any, left: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    left()


async def _whole(
    send: Any, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    named = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": body})
