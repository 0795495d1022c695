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

from tests.support.http_server import Headers, Request, ServerConnection
from workers.protocol import LaneReport, Speculation, WorkerReport

JOIN_TOKEN = "join-token-of-the-tests"
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
    tokens: tuple[str, ...] = ("one", " two", " three")
    events: tuple[bytes, ...] | None = None
    """Stream exactly these pieces."""
    pause_s: float = 0.0
    """Wait so long before each stream event."""
    cut_after: int | None = None
    """Break the connection after so many stream events, without an end."""
    end_after: int | None = None
    """End the answer cleanly after so many stream events, as a dead HTTP/1.0 worker seems to."""
    hang_after: int | None = None
    """Say nothing more after so many stream events, until the client leaves or `resume` is set."""
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
    rotation: tuple[Script, ...] = ()
    """Answer by each of these in turn, again and again: a flaky worker."""


@dataclass
class ReceivedRequest:
    """One request as the worker got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    generated: bool = False
    """An answer was begun: from here on a second one elsewhere would be a duplicate."""


@dataclass
class ScriptedWorker:
    """A worker with two lanes of four rows; run it with `serving`, or as a process of its own."""

    worker_id: str = "fake-a"
    boot_id: str = "boot-1"
    model: str = "demo"
    lanes: tuple[str, ...] = ("text-mtp", "vlm")
    script: Script = field(default_factory=Script)
    scripts_by_message: dict[str, Script] = field(default_factory=dict)
    """By the words of the request's last message; the others go by `script`."""
    requests: list[ReceivedRequest] = field(default_factory=list)
    request_received: threading.Event = field(default_factory=threading.Event)
    """Set with every request."""
    in_flight: int = 0
    """Requests being answered now: the rows that are taken."""
    client_disconnected: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    status_report: WorkerReport | None = None
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

    async def __call__(self, link: ServerConnection, request: Request) -> None:
        """Answer one request."""
        if request.path == FAULT_PATH:
            self.script = parse_script(request.json())
            await _send_response(link, 200, b"{}")
        elif request.method == "GET":
            report = self.status_report or self.report()
            told = {"report": report.model_dump(mode="json"), "answering": self.in_flight}
            await _send_response(link, 200, json.dumps(told).encode())
        else:
            await self._generate(link, request)

    async def _generate(self, link: ServerConnection, request: Request) -> None:
        heard = ReceivedRequest(request.path, request.headers, request.json())
        script = self._script(heard)
        if script.drop_reused and link.request_count > 1:
            return link.abort()  # as if the request had crossed the closing of an idle connection
        self.requests.append(heard)
        self.request_received.set()
        self.in_flight += 1
        try:
            await self._answer(link, heard, script)
        finally:
            self.in_flight -= 1
            if link.client_closed.is_set():
                self.client_disconnected.set()

    def _script(self, heard: ReceivedRequest) -> Script:
        messages = heard.body.get("messages") or [{}]
        words = messages[-1].get("content")
        script = (
            self.scripts_by_message.get(words, self.script)
            if isinstance(words, str)
            else self.script
        )
        return (
            script.rotation[next(self._turn) % len(script.rotation)] if script.rotation else script
        )

    async def _answer(self, link: ServerConnection, heard: ReceivedRequest, script: Script) -> None:
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
            return await _send_response(link, script.status, body, script)
        if heard.body.get("stream"):
            return await self._stream(link, script)
        whole = json.dumps(chat_completion("".join(script.tokens))).encode()
        return await _send_response(link, 200, whole, script)

    async def _stream(self, link: ServerConnection, script: Script) -> None:
        named = ((b"content-type", b"text/event-stream"), *script.headers)
        await link.send_head(200, named, length=None, http_1_0=script.http_1_0)
        pieces = script.events if script.events is not None else stream_events(script.tokens)
        for sent, piece in enumerate([*pieces, None]):
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            if script.hang_after == sent:
                await self._hang(link)
            if script.cut_after == sent:
                return link.close()
            if script.end_after == sent or piece is None:
                break
            await link.send_body(piece)
        return await link.end_body()

    async def _hang(self, link: ServerConnection) -> None:
        while not (link.client_closed.is_set() or self.resume.is_set()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(link.client_closed.wait(), 0.005)


def parse_script(told: Mapping[str, Any]) -> Script:
    """Read a script as `POST /_fault` takes it: the fields of `Script`, bytes as text."""
    values = dict(told)
    for name in ("body", "raw"):
        if values.get(name) is not None:
            values[name] = values[name].encode()
    if values.get("events") is not None:
        values["events"] = tuple(piece.encode() for piece in values["events"])
    values["headers"] = tuple((k.encode(), v.encode()) for k, v in values.get("headers", ()))
    values["rotation"] = tuple(parse_script(one) for one in values.get("rotation", ()))
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


def chat_completion(text: str) -> dict[str, Any]:
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


async def _send_response(
    link: ServerConnection, status: int, body: bytes, script: Script | None = None
) -> None:
    named = ((b"content-type", b"application/json"), *(script.headers if script else ()))
    await link.send_head(status, named, length=len(body))
    await link.send_body(body)
