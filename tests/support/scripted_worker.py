"""A worker that does what a test tells it, down to the bytes, behind a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Headers, Link, Request
from workers.protocol import LaneReport, Speculation, WorkerReport

TOKEN = "join-token-of-the-tests"
FAULT_PATH = "/_fault"
"""POST a script here; no script stands in its way."""

USAGE: dict[str, Any] = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}
DRAFTS = Speculation(num_spec_tokens=2, steps=1, drafted=2, accepted=1, histogram=(0, 1, 0))
METRICS = {"speculative_decoding": DRAFTS.as_request_metrics()}


@dataclass(kw_only=True)
class Script:
    """How the next answers go."""

    status: int = 200
    body: bytes | None = None
    """Sent as it is in place of an answer."""
    headers: Headers = ()
    words: tuple[str, ...] = ("one", " two", " three")
    events: tuple[bytes, ...] | None = None
    """Stream exactly these pieces."""
    pause_s: float = 0.0
    """Wait so long before each stream event."""
    cut_after: int | None = None
    """Break the connection after so many stream events, without an end."""
    end_after: int | None = None
    """End the answer cleanly after so many stream events, as a dead HTTP/1.0 worker seems to."""
    hang_after: int | None = None
    """Say nothing more after so many stream events, until the client leaves or `go_on` is set."""
    hang: bool = False
    """Say nothing at all."""
    drop: bool = False
    """Close the connection in place of an answer."""
    drop_reused: bool = False
    """Close a connection that is used a second time, in place of an answer."""
    http_1_0: bool = False
    """Speak HTTP/1.0 as mlx_lm does: a stream ends where the connection does, however it ends."""
    raw: bytes | None = None
    """Send exactly these bytes, the head included, and close."""
    turns: tuple[Script, ...] = ()
    """Answer by each of these in turn, again and again: a flaky worker."""


@dataclass
class Heard:
    """One request as the worker got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    generated: bool = False
    """An answer was begun: from here on a second one elsewhere would be a duplicate."""


@dataclass
class FakeWorker:
    """A worker with two lanes of four rows; run it with `serving`, or as a process of its own."""

    worker_id: str = "fake-a"
    boot_id: str = "boot-1"
    model: str = "demo"
    lanes: tuple[str, ...] = ("text-mtp", "vlm")
    script: Script = field(default_factory=Script)
    plans: dict[str, Script] = field(default_factory=dict)
    """By the words of the request's last message; the others go by `script`."""
    heard: list[Heard] = field(default_factory=list)
    hearing: threading.Event = field(default_factory=threading.Event)
    """Set with every request."""
    answering: int = 0
    """Requests being answered now: the rows that are taken."""
    client_left: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    reported: WorkerReport | None = None
    """Given out by /v1/status; None answers with `report()`."""
    port: int = 0
    """0 takes any free one."""

    def __post_init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._turn = itertools.count()

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

    async def __call__(self, link: Link, request: Request) -> None:
        """Answer one request."""
        if request.path == FAULT_PATH:
            self.script = script_of(request.json())
            await _whole(link, 200, b"{}")
        elif request.method == "GET":
            report = self.reported or self.report()
            told = {"report": report.model_dump(mode="json"), "answering": self.answering}
            await _whole(link, 200, json.dumps(told).encode())
        else:
            await self._generate(link, request)

    async def _generate(self, link: Link, request: Request) -> None:
        heard = Heard(request.path, request.headers, request.json())
        script = self._script(heard)
        if script.drop_reused and link.used > 1:
            return link.abort()  # as if the request had crossed the closing of an idle connection
        self.heard.append(heard)
        self.hearing.set()
        self.answering += 1
        try:
            await self._answer(link, heard, script)
        finally:
            self.answering -= 1
            if link.left.is_set():
                self.client_left.set()

    def _script(self, heard: Heard) -> Script:
        messages = heard.body.get("messages") or [{}]
        words = messages[-1].get("content")
        script = self.plans.get(words, self.script) if isinstance(words, str) else self.script
        return script.turns[next(self._turn) % len(script.turns)] if script.turns else script

    async def _answer(self, link: Link, heard: Heard, script: Script) -> None:
        if script.hang:
            await self._hang(link)
        if script.drop:
            return link.close()
        heard.generated = script.status == 200
        if script.raw is not None:
            await link.send(script.raw)
            return link.close()
        if script.body is not None or script.status != 200:
            body = b"{}" if script.body is None else script.body
            return await _whole(link, script.status, body, script)
        if heard.body.get("stream"):
            return await self._stream(link, script)
        whole = json.dumps(whole_answer("".join(script.words))).encode()
        return await _whole(link, 200, whole, script)

    async def _stream(self, link: Link, script: Script) -> None:
        named = ((b"content-type", b"text/event-stream"), *script.headers)
        await link.begin(200, named, length=None, http_1_0=script.http_1_0)
        pieces = script.events if script.events is not None else stream_events(script.words)
        for sent, piece in enumerate([*pieces, None]):
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            if script.hang_after == sent:
                await self._hang(link)
            if script.cut_after == sent:
                return link.close()
            if script.end_after == sent or piece is None:
                break
            await link.part(piece)
        return await link.end()

    async def _hang(self, link: Link) -> None:
        while not (link.left.is_set() or self.go_on.is_set()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.left.wait(), 0.005)


def script_of(told: Mapping[str, Any]) -> Script:
    """Read a script as `POST /_fault` takes it: the fields of `Script`, bytes as text."""
    values = dict(told)
    for name in ("body", "raw"):
        if values.get(name) is not None:
            values[name] = values[name].encode()
    if values.get("events") is not None:
        values["events"] = tuple(piece.encode() for piece in values["events"])
    values["headers"] = tuple((k.encode(), v.encode()) for k, v in values.get("headers", ()))
    values["turns"] = tuple(script_of(turn) for turn in values.get("turns", ()))
    return Script(**values)


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


async def _whole(link: Link, status: int, body: bytes, script: Script | None = None) -> None:
    named = ((b"content-type", b"application/json"), *(script.headers if script else ()))
    await link.begin(status, named, length=len(body))
    await link.part(body)
