"""One OpenAI endpoint, asked over connections of its own; what comes is kept, and read later.

One answer as it arrived, and what can be read from it once nothing is being timed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from gateway.loadgen import CannotMeasure
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.prompts import Prompt

_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came over the connection; times are of one clock, in seconds."""

    due_s: float
    """When the request was to be sent; waiting in the client counts from here."""
    ended_s: float
    status: int = 0
    """0: no answer began."""
    arrivals: tuple[tuple[float, bytes], ...] = ()
    problem: str = ""
    """What broke the connection, if anything did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request brought."""

    due_s: float
    ended_s: float
    pieces_s: tuple[float, ...] = ()
    """When each piece of text arrived."""
    input_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True
    """The server told its tokens; otherwise pieces are counted for them."""
    drafts: Drafts | None = None
    problem: str = ""
    """Why it is no whole answer, in a few words."""

    @property
    def ttft_s(self) -> float | None:
        """Return the time from when it was due to the first text, if any came."""
        return self.pieces_s[0] - self.due_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token behind the first."""
        if not self.pieces_s or self.output_tokens < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Return the pauses between pieces."""
        return tuple(
            later - earlier
            for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)
        )

    @property
    def whole_s(self) -> float:
        """Return the time from when it was due to its last byte."""
        return self.ended_s - self.due_s


def read_answer(heard: Heard) -> Answer:
    """Read the events of a stream; whatever is not whole says so in `problem`."""
    if heard.status != 200:
        return _failed(heard, heard.problem or _refusal(heard))
    try:
        return _read(heard)
    except (AttributeError, TypeError):  # a list where an object belongs, and the like
        return _failed(heard, "an event is not in OpenAI's shape")


def _read(heard: Heard) -> Answer:
    pieces: list[float] = []
    usage: Mapping[str, Any] = {}
    drafts = None
    finished = False
    for arrived_s, frame in _frames(heard.arrivals):
        if frame.get("error"):
            return _failed(heard, f"broke off: {_words(frame)}")
        for choice in frame.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(field) for field in _TEXT_FIELDS):
                pieces.append(arrived_s)
            finished |= choice.get("finish_reason") is not None
        usage = frame.get("usage") or usage
        drafts = Drafts.of_answer(frame) or drafts
    if heard.problem or not finished:
        return _failed(heard, heard.problem or "ended without a finish reason")
    asked, told = (usage.get(f"{kind}_tokens") for kind in ("prompt", "completion"))
    return Answer(
        due_s=heard.due_s,
        ended_s=heard.ended_s,
        pieces_s=tuple(pieces),
        input_tokens=asked if isinstance(asked, int) else 0,
        output_tokens=told if isinstance(told, int) else len(pieces),
        counted=isinstance(told, int),
        drafts=drafts,
    )


def _frames(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield each event with the moment at which its last byte came."""
    rest = b""
    for arrived_s, part in arrivals:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (frame := _json(line.removeprefix(b"data:"))):
                yield arrived_s, frame


def _json(text: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(text)
    except ValueError:  # also [DONE]
        return None
    return read if isinstance(read, dict) else None


def _failed(heard: Heard, problem: str) -> Answer:
    return Answer(due_s=heard.due_s, ended_s=heard.ended_s, problem=problem)


def _refusal(heard: Heard) -> str:
    body = b"".join(part for _, part in heard.arrivals)
    return f"{heard.status}: {_words(_json(body) or {})}"


def _words(frame: Mapping[str, Any]) -> str:
    match frame.get("error"):
        case {"message": str(message)} | str(message):
            return message[:200]
    return "without a reason"


_CONNECT_TIMEOUT_S: Final = 10.0
_PAUSE_TIMEOUT_S: Final = 600.0
"""No answer, and no piece of one, is waited for longer: a long prompt may take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which endpoint is asked, and how."""

    url: str
    """With or without the trailing /v1."""
    model: str = ""
    """Empty: one that the endpoint lists."""
    api_key: str = ""
    fields: Mapping[str, Any]
    """What stands in each request beside its messages."""

    @property
    def base_url(self) -> str:
        """Return where its API begins, without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")


class Endpoint:
    """An endpoint that listed its models."""

    def __init__(self, client: httpx.AsyncClient, target: Target, model: str) -> None:
        self.url = target.base_url
        self.model = model
        self._client = client
        self._fields = dict(target.fields)

    async def ask(self, prompt: Prompt, *, due_s: float | None = None) -> Heard:
        """Ask for a stream and keep all that comes, with its moments; never raise for what fails.

        `due_s` (`time.perf_counter`) is when the request was to be sent; None means now.
        """
        body = self._body(prompt)
        began_s = time.perf_counter() if due_s is None else due_s
        arrivals: list[tuple[float, bytes]] = []
        status, problem = 0, ""
        try:
            request = self._client.stream("POST", "/v1/chat/completions", content=body)
            async with request as response:
                status = response.status_code
                async for part in response.aiter_raw():
                    # One by one, so that what came is known where the connection breaks.
                    arrivals.append((time.perf_counter(), part))  # noqa: PERF401
        except httpx.TimeoutException:
            problem = "nothing came in time"
        except httpx.HTTPError as error:
            problem = f"the connection failed: {error or type(error).__name__}"
        return Heard(
            due_s=began_s,
            ended_s=time.perf_counter(),
            status=status,
            arrivals=tuple(arrivals),
            problem=problem,
        )

    async def try_out(self, prompt: Prompt) -> Answer:
        """Ask once, so that a wrong key or model is told of before anything is measured."""
        answer = read_answer(await self.ask(prompt))
        if answer.problem:
            raise CannotMeasure(f"{self.url} does not answer as asked: {answer.problem}")
        return answer

    async def counters(self) -> Drafts | None:
        """Read the server's own counters of drafts, if it has vLLM's."""
        with contextlib.suppress(httpx.HTTPError):
            answer = await self._client.get("/metrics", timeout=_CONNECT_TIMEOUT_S)
            if answer.is_success:
                return Drafts.of_exposition(answer.text)
        return None

    def _body(self, prompt: Prompt) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": prompt.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._fields,
        }
        if prompt.max_tokens is not None:
            fields["max_tokens"] = prompt.max_tokens
        return json.dumps(fields).encode()


@contextlib.asynccontextmanager
async def opened(target: Target, *, like: str = "") -> AsyncIterator[Endpoint]:
    """Reach an endpoint and learn which model to ask for; raise `CannotMeasure` if it cannot be.

    `like` is the model of another endpoint, preferred where none is named.
    """
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",  # a compressed event would arrive late
        **({"authorization": f"Bearer {target.api_key}"} if target.api_key else {}),
    }
    timeout = httpx.Timeout(_PAUSE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        client = httpx.AsyncClient(
            base_url=target.base_url, headers=headers, timeout=timeout, limits=limits
        )
    except httpx.InvalidURL:
        raise CannotMeasure(f"'{target.url}' is not a URL.") from None
    async with client:
        yield Endpoint(client, target, await _model(client, target, like))


async def _model(client: httpx.AsyncClient, target: Target, like: str) -> str:
    """Return the model that was named, else one like the other's, else the first that is listed."""
    if target.model:
        return target.model
    try:
        answer = await client.get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
        told = answer.json()
    except httpx.UnsupportedProtocol:
        raise CannotMeasure(f"'{target.url}' is not a URL.") from None
    except httpx.HTTPError:
        raise CannotMeasure(f"nothing answers at {target.base_url}.") from None
    except ValueError:
        told = None
    match told:
        case {"data": [{"id": str(first)}, *_] as listed}:
            return like if any(entry.get("id") == like for entry in listed) else first
        case {"error": {"message": str(why)}}:
            raise CannotMeasure(f"{target.base_url} does not list its models: {why}")
    raise CannotMeasure(f"{target.base_url} lists no model; --model names one.")
