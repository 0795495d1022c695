"""A worker on a real socket that follows a script, down to the bytes."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from paceline.protocol import (
    ANSWER_FIELD,
    CHECKS,
    PROGRESS_HEADER,
    TOKENS_LINE,
    LaneReport,
    Speculation,
    WorkerReport,
)
from tests.support.http_server import Headers, Request, ServerConnection

JOIN_TOKEN = "join-token-of-the-tests"
FAULT_PATH = "/_fault"
"""POST a script here; no script affects this path."""

USAGE: dict[str, Any] = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 2},
}
DRAFTS = Speculation(
    num_spec_tokens=2,
    steps=1,
    drafted=2,
    accepted=1,
    histogram=(0, 1, 0),
    drafted_by_source={"head": 1, "lookup": 1},
    accepted_by_source={"head": 1},
)
METRICS: dict[str, Any] = {
    "speculative_decoding": DRAFTS.as_request_metrics(),
    "draft_sources": DRAFTS.by_source,
}


@dataclass(kw_only=True)
class Script:
    """A script of the next answers."""

    status: int = 200
    body: bytes | None = None
    """Sent unchanged instead of an answer."""
    headers: Headers = ()
    tokens: tuple[str, ...] = ("one", " two", " three")
    tells_tokens: bool = False
    """Tell the tokens of streams, and go on with those of other workers."""
    events: tuple[bytes, ...] | None = None
    """Stream exactly these pieces."""
    pause_s: float = 0.0
    """Pause before each stream event."""
    cut_after: int | None = None
    """Close the connection after this number of stream events, without an end."""
    end_after: int | None = None
    """End the answer cleanly after this number of events, like a crashed HTTP/1.0 worker."""
    hang_after: int | None = None
    """Stop after this number of events until the client disconnects or `resume` is set."""
    hang: bool = False
    """Send no byte until the client disconnects or `resume` is set."""
    drop: bool = False
    """Close the connection instead of an answer."""
    drop_reused: bool = False
    """Reset a reused connection instead of an answer."""
    http_1_0: bool = False
    """Use HTTP/1.0 as mlx_lm does: any end of the connection ends a stream."""
    raw: bytes | None = None
    """Send exactly these bytes, the head included, and close."""
    rotation: tuple["Script", ...] = ()
    """Answer by these scripts in rotation, as a flaky worker."""


@dataclass
class ReceivedRequest:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    generated: bool = False
    """The answer has begun: an answer of another worker would be a duplicate."""


@dataclass
class ScriptedWorker:
    """A worker with two lanes of four rows; `running_server` serves it in a thread."""

    worker_id: str = "fake-a"
    boot_id: str = "boot-1"
    model: str = "demo"
    lanes: tuple[str, ...] = ("text-mtp", "vlm")
    script: Script = field(default_factory=Script)
    scripts_by_message: dict[str, Script] = field(default_factory=dict)
    """Scripts by the text of the last message; `script` applies to other requests."""
    requests: list[ReceivedRequest] = field(default_factory=list)
    check_answer: tuple[int, bytes] = (200, b'{"prompt_tokens": 7}')
    """Status and body for a request to check another one."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """The bodies that the worker has checked."""
    request_received: threading.Event = field(default_factory=threading.Event)
    """Set with every request."""
    in_flight: int = 0
    """Current requests, which are the used rows."""
    client_disconnected: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    status_report: WorkerReport | None = None
    """The report in /v1/status; None means `report()`."""
    status_body: bytes | None = None
    """The body of /v1/status, sent unchanged."""
    authorizations: list[str] = field(default_factory=list)
    """The `Authorization` headers of requests for /v1/status."""
    port: int = 0
    """0 means any free port."""
    fingerprint: str = ""
    """Of the model; workers with the same one continue each other's streams."""
    remembers: bool = False
    """Report tokens by the text of a chat, those of a beginning that it had before as cached."""

    def __post_init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self._answers = itertools.count()
        self._known: set[tuple[str, ...]] = set()
        self._initial = {one.name: getattr(self, one.name) for one in fields(self)}

    def reset(self) -> None:
        """Forget all requests and scripts, for the next of the tests that share this worker."""
        self._answers = itertools.count()
        for one in fields(self):
            if one.name != "in_flight":
                make = one.default_factory
                setattr(self, one.name, self._initial[one.name] if make is MISSING else make())

    def report(self, **changes: Any) -> WorkerReport:
        report = WorkerReport(
            worker_id=self.worker_id,
            boot_id=self.boot_id,
            url=self.url,
            model=self.model,
            fingerprint=self.fingerprint,
            context_tokens=4096,
            lanes=tuple(lane_report(name) for name in self.lanes),
        )
        return WorkerReport.model_validate({**report.model_dump(), **changes})

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        if request.path == FAULT_PATH:
            self.script = parse_script(request.json())
            await _send_response(connection, 200, b"{}")
        elif request.method == "GET":
            self.authorizations.append(request.headers.get("authorization", ""))
            report = self.status_report or self.report()
            status = {"report": report.model_dump(mode="json"), "answering": self.in_flight}
            body = self.status_body or json.dumps(status).encode()
            await _send_response(connection, 200, body)
        elif request.path.startswith(CHECKS):
            self.checks.append(request.json())
            await _send_response(connection, *self.check_answer)
        else:
            await self._generate(connection, request)

    async def _generate(self, connection: ServerConnection, request: Request) -> None:
        received = ReceivedRequest(request.path, request.headers, request.json())
        script = self._script(received)
        if script.drop_reused and connection.request_count > 1:
            # As if the worker had closed the idle connection at that time.
            return connection.abort()
        self.requests.append(received)
        self.request_received.set()
        self.in_flight += 1
        try:
            await self._answer(connection, received, script)
        finally:
            self.in_flight -= 1
            if connection.client_closed.is_set():
                self.client_disconnected.set()

    def _script(self, received: ReceivedRequest) -> Script:
        messages = received.body.get("messages") or [{}]
        text = messages[-1].get("content")
        script = (
            self.scripts_by_message.get(text, self.script) if isinstance(text, str) else self.script
        )
        return (
            script.rotation[next(self._answers) % len(script.rotation)]
            if script.rotation
            else script
        )

    async def _answer(
        self, connection: ServerConnection, received: ReceivedRequest, script: Script
    ) -> None:
        if script.hang:
            await self._hang(connection)
        if script.drop:
            return connection.close()
        received.generated = script.status == 200
        if script.raw is not None:
            await connection.send(script.raw)
            return connection.close()
        if script.body is not None or script.status != 200:
            body = b"{}" if script.body is None else script.body
            return await _send_response(connection, script.status, body, script)
        if received.body.get("stream"):
            pieces = script.events
            if script.tells_tokens and PROGRESS_HEADER in received.headers:
                pieces = told_events(script.tokens, received.body.get(ANSWER_FIELD, ""))
            return await self._stream(connection, script, pieces)
        answer = chat_completion("".join(script.tokens))
        if self.remembers:
            answer |= {"usage": self._usage(received.body["messages"])}
        completion = json.dumps(answer).encode()
        return await _send_response(connection, 200, completion, script)

    def _usage(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [json.dumps(message) for message in messages]
        beginnings = [tuple(texts[:end]) for end in range(len(texts) + 1)]
        known = max((one for one in beginnings if one in self._known), key=len, default=())
        self._known.update(beginnings)
        prompt, cached = len("".join(texts)) // 4, len("".join(known)) // 4
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return USAGE | details | {"prompt_tokens": prompt, "total_tokens": prompt + 3}

    async def _stream(
        self, connection: ServerConnection, script: Script, pieces: tuple[bytes, ...] | None
    ) -> None:
        headers = ((b"content-type", b"text/event-stream"), *script.headers)
        await connection.send_head(200, headers, length=None, http_1_0=script.http_1_0)
        if pieces is None:
            pieces = stream_events(script.tokens)
        for sent, piece in enumerate([*pieces, None]):
            if script.pause_s:
                await asyncio.sleep(script.pause_s)
            if script.hang_after == sent:
                await self._hang(connection)
            if script.cut_after == sent:
                return connection.close()
            if script.end_after == sent or piece is None:
                break
            await connection.send_body(piece)
        return await connection.end_body()

    async def _hang(self, connection: ServerConnection) -> None:
        while not (connection.client_closed.is_set() or self.resume.is_set()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.client_closed.wait(), 0.005)


def parse_script(fields: Mapping[str, Any]) -> Script:
    """Return the script of a request to `FAULT_PATH`: the fields of `Script`, bytes as text."""
    values = dict(fields)
    for name in ("body", "raw"):
        if values.get(name) is not None:
            values[name] = values[name].encode()
    if values.get("events") is not None:
        values["events"] = tuple(piece.encode() for piece in values["events"])
    values["headers"] = tuple((k.encode(), v.encode()) for k, v in values.get("headers", ()))
    values["rotation"] = tuple(parse_script(rotated) for rotated in values.get("rotation", ()))
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


def both_lanes(*, slots: int) -> tuple[LaneReport, LaneReport]:
    return lane_report("text-mtp", slots=slots), lane_report("vlm", slots=slots)


def speculation(*, steps: int, one: int, two: int) -> Speculation:
    """Return the counts of steps at k = 2; `one` accepted one token and `two` both."""
    return Speculation(
        num_spec_tokens=2,
        steps=steps,
        drafted=2 * steps,
        accepted=one + 2 * two,
        histogram=(steps - one - two, one, two),
        drafted_by_source={"head": steps, "lookup": steps},
        accepted_by_source={"head": one + two, "lookup": two},
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


def stream_events(tokens: Iterable[str]) -> tuple[bytes, ...]:
    return (
        chunk({"role": "assistant", "content": ""}),
        *(chunk({"content": token}) for token in tokens),
        chunk({}, "stop"),
        usage_chunk(),
        DONE,
    )


def told_events(tokens: Iterable[str], so_far: str) -> tuple[bytes, ...]:
    """Return the events of a stream with lines that tell its tokens, from where a client has it."""
    *texts, usage, done = stream_events(tokens)
    words = ["@1", *map(str, range(len(texts) - 2)), "."]
    lines = [f"0 {word}" for word in words]
    given = so_far.split(";") if so_far else []
    assert given == lines[: len(given)], "what the first worker has told"
    told = [
        TOKENS_LINE + line.encode() + b"\n" + text for line, text in zip(lines, texts, strict=True)
    ]
    return (*told[len(given) :], usage, done)


async def _send_response(
    connection: ServerConnection, status: int, body: bytes, script: Script | None = None
) -> None:
    headers = ((b"content-type", b"application/json"), *(script.headers if script else ()))
    await connection.send_head(status, headers, length=len(body))
    await connection.send_body(body)
