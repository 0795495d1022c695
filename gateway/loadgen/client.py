"""A client for one OpenAI endpoint that records arrivals first and parses them later.

Parsing while other streams run would delay the very arrivals that the client times.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from gateway.loadgen import MeasurementError, json_object
from gateway.loadgen.drafts import Drafts
from gateway.loadgen.prompts import Prompt

_CONNECT_TIMEOUT_S: Final = 10.0
_PAUSE_TIMEOUT_S: Final = 600.0
"""The longest wait for a response or a piece of it: a long prompt may take minutes."""
_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResponse:
    """The bytes of one response with their arrival times, in seconds of one clock."""

    due_s: float
    """The time at which the request was due; a delay in the client counts."""
    ended_s: float
    status: int = 0
    """0: no response began."""
    arrivals: tuple[tuple[float, bytes], ...] = ()
    problem: str = ""
    """The reason for a broken connection, or an empty string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One parsed answer."""

    due_s: float
    ended_s: float
    pieces_s: tuple[float, ...] = ()
    """The arrival time of each piece of text."""
    texts: tuple[str, ...] = ()
    """The text of each piece; empty for pieces of another kind."""
    input_tokens: int = 0
    output_tokens: int = 0
    tokens_reported: bool = True
    """Whether the server reported tokens; otherwise `output_tokens` counts pieces."""
    drafts: Drafts | None = None
    problem: str = ""
    """The reason why the answer is incomplete, in a few words."""

    @property
    def ttft_s(self) -> float | None:
        """Return the time from due to the first text, or None without text."""
        return self.pieces_s[0] - self.due_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first."""
        if not self.pieces_s or self.output_tokens < 2:
            return None
        return (self.pieces_s[-1] - self.pieces_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Return the pauses between pieces."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.pieces_s))

    @property
    def whole_s(self) -> float:
        """Return the time from due to the last byte."""
        return self.ended_s - self.due_s


def read_answer(response: RawResponse) -> Answer:
    """Parse the events of a stream; `problem` describes an incomplete answer."""
    answer = functools.partial(Answer, due_s=response.due_s, ended_s=response.ended_s)
    if response.status != 200:
        body = b"".join(part for _, part in response.arrivals)
        reason = _reason(json_object(body) or {})
        return answer(problem=response.problem or f"{response.status}: {reason}")
    try:
        return _read(response, answer)
    except (AttributeError, TypeError):  # a list where an object belongs, and the like
        return answer(problem="an event is not in OpenAI's format")


def _read(response: RawResponse, answer: Callable[..., Answer]) -> Answer:
    pieces_s: list[float] = []
    texts: list[str] = []
    usage: Mapping[str, Any] = {}
    drafts = None
    finished = False
    for arrived_s, frame in _frames(response.arrivals):
        if frame.get("error"):
            return answer(problem=f"broke off: {_reason(frame)}")
        for choice in frame.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(delta.get(field) for field in _TEXT_FIELDS):
                pieces_s.append(arrived_s)
                texts.append(delta.get("content") or "")
            finished |= choice.get("finish_reason") is not None
        usage = frame.get("usage") or usage
        drafts = Drafts.of_answer(frame) or drafts
    if response.problem or not finished:
        return answer(problem=response.problem or "ended without a finish reason")
    prompt_tokens, completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return answer(
        pieces_s=tuple(pieces_s),
        texts=tuple(texts),
        input_tokens=prompt_tokens if isinstance(prompt_tokens, int) else 0,
        output_tokens=completion_tokens if isinstance(completion_tokens, int) else len(pieces_s),
        tokens_reported=isinstance(completion_tokens, int),
        drafts=drafts,
    )


def _frames(arrivals: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield each event with the arrival time of its last byte."""
    rest = b""
    for arrived_s, part in arrivals:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            # The last event, [DONE], is no object.
            if line.startswith(b"data:") and (frame := json_object(line[5:])):
                yield arrived_s, frame


def _reason(frame: Mapping[str, Any]) -> str:
    match frame.get("error"):
        case {"message": str(message)} | str(message):
            # Shown on a terminal, which obeys control characters.
            return "".join(one if one.isprintable() else "\ufffd" for one in message[:200])
    return "without a reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint under test, with the model to request."""

    client: httpx.AsyncClient
    url: str
    """Without the trailing /v1."""
    model: str
    fields: Mapping[str, Any]
    """Fields of each request beside its model and messages."""

    async def send(
        self,
        prompt: Prompt,
        *,
        due_s: float | None = None,
        fields: Mapping[str, Any] | None = None,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> RawResponse:
        """Request a stream and record its bytes with their times; raise nothing for a failure.

        `due_s` (`time.perf_counter`) is the time at which the request was due; None means now.
        `fields` override those of the endpoint; `on_arrival` is called for each piece of bytes.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": prompt.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
            **(fields or {}),
        }
        if prompt.max_tokens is not None:
            body["max_tokens"] = prompt.max_tokens
        content = json.dumps(body).encode()
        began_s = time.perf_counter() if due_s is None else due_s
        arrivals: list[tuple[float, bytes]] = []
        status, problem = 0, ""
        try:
            request = self.client.stream("POST", "/v1/chat/completions", content=content)
            async with request as response:
                status = response.status_code
                async for part in response.aiter_raw():
                    arrivals.append((time.perf_counter(), part))
                    on_arrival()
        except httpx.TimeoutException:
            problem = "the response timed out"
        except httpx.HTTPError as error:
            problem = f"the connection failed: {error or type(error).__name__}"
        return RawResponse(
            due_s=began_s,
            ended_s=time.perf_counter(),
            status=status,
            arrivals=tuple(arrivals),
            problem=problem,
        )

    async def check(self, prompt: Prompt) -> None:
        """Send one request; raise `MeasurementError` for a wrong key or model."""
        answer = read_answer(await self.send(prompt))
        if answer.problem:
            raise MeasurementError(f"{self.url} does not answer: {answer.problem}")

    async def read_counters(self) -> Drafts | None:
        """Return the server's counters of drafts, if it exposes vLLM's."""
        with contextlib.suppress(httpx.HTTPError):
            answer = await self.client.get("/metrics", timeout=_CONNECT_TIMEOUT_S)
            if answer.is_success:
                return Drafts.of_exposition(answer.text)
        return None


@contextlib.asynccontextmanager
async def open_endpoint(
    url: str, *, fields: Mapping[str, Any], model: str = "", like: str = "", api_key: str = ""
) -> AsyncIterator[Endpoint]:
    """Connect to an endpoint and select its model; raise `MeasurementError` if that fails.

    `url` may end in /v1; `fields` are those of each request beside its messages. Without `model`,
    the model is `like` if the endpoint lists it, else the first one that it lists.
    """
    base_url = url.rstrip("/").removesuffix("/v1")
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",  # a compressed event would arrive late
        **({"authorization": f"Bearer {api_key}"} if api_key else {}),
    }
    timeout = httpx.Timeout(_PAUSE_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S, pool=None)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        client = httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout, limits=limits
        )
    except httpx.InvalidURL:
        raise MeasurementError(f"'{url}' is not a URL.") from None
    async with client:
        model = model or await _listed_model(client, url, base_url, like)
        yield Endpoint(client=client, url=base_url, model=model, fields=fields)


async def _listed_model(client: httpx.AsyncClient, url: str, base_url: str, like: str) -> str:
    try:
        answer = await client.get("/v1/models", timeout=_CONNECT_TIMEOUT_S)
    except httpx.UnsupportedProtocol:
        raise MeasurementError(f"'{url}' is not a URL.") from None
    except httpx.HTTPError:
        raise MeasurementError(f"nothing answers at {base_url}.") from None
    match json_object(answer.content):
        case {"data": [{"id": str(first)}, *_] as listed}:
            chats = [one.get("id") for one in listed if "chat" in one.get("endpoints", ("chat",))]
            return like if like in chats else str(next(iter(chats), first))
        case {"error": {"message": str(why)}}:
            raise MeasurementError(f"{base_url} does not list its models: {why}")
    raise MeasurementError(f"{base_url} does not list any model; name one with --model.")
