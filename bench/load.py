"""The load: chat requests over HTTP, streamed, with the moment at which each piece arrived."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

ANSWER_TIMEOUT_S: Final = 180.0
LONGEST_ANSWER_TOKENS: Final = 1000
"""A bound for models that never end; the demo model ends its answers by itself."""

Messages = Sequence[Mapping[str, Any]]


class RequestFailed(Exception):
    """A server refused a request or broke off its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What a server says of its drafts; `histogram[j]` counts the steps that accepted just j."""

    steps: int
    drafted: int
    accepted: int
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; times are of `time.perf_counter`."""

    sent_s: float
    ended_s: float
    pieces: tuple[tuple[float, str], ...]
    finish_reason: str
    drafts: Drafts | None

    @property
    def text(self) -> str:
        """Return all pieces as one."""
        return "".join(text for _, text in self.pieces)

    @property
    def ttft_s(self) -> float:
        """Return the time from sending to the first text, or to the end where none came."""
        return (self.pieces[0][0] if self.pieces else self.ended_s) - self.sent_s

    def text_before(self, moment_s: float) -> str:
        """Return what had arrived at a moment."""
        return "".join(text for arrived_s, text in self.pieces if arrived_s <= moment_s)


class Caller:
    """Asks one server, always greedily, and reads its streams."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(
        self,
        messages: Messages,
        *,
        max_tokens: int = LONGEST_ANSWER_TOKENS,
        extra: Mapping[str, Any] | None = None,
        on_event: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Return the answer; `on_event` is called at each event of the stream."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extra or {}),
        }
        lines: list[tuple[float, str]] = []
        sent_s = time.perf_counter()
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                refusal = (await response.aread()).decode(errors="replace")
                raise RequestFailed(f"{response.status_code}: {refusal[:200]}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    lines.append((time.perf_counter(), line))
                    on_event()
        # Read only now: while others stream, the reader must cost them as little as it can.
        return _read(sent_s, lines)


@asynccontextmanager
async def calling(url: str, model: str) -> AsyncIterator[Caller]:
    """Open connections to a server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    timeout = httpx.Timeout(ANSWER_TIMEOUT_S)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
        yield Caller(client, model)


def _read(sent_s: float, lines: list[tuple[float, str]]) -> Answer:
    pieces: list[tuple[float, str]] = []
    finish_reason = ""
    drafts = None
    for arrived_s, line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise RequestFailed(f"broke off: {chunk['error']}")
        for choice in chunk.get("choices", ()):
            text = choice["delta"].get("content")
            if text:
                pieces.append((arrived_s, text))
            finish_reason = choice.get("finish_reason") or finish_reason
        drafts = _read_drafts(chunk) or drafts
    if not finish_reason:
        raise RequestFailed("ended without a finish reason")
    return Answer(
        sent_s=sent_s,
        ended_s=lines[-1][0],
        pieces=tuple(pieces),
        finish_reason=finish_reason,
        drafts=drafts,
    )


def _read_drafts(chunk: Mapping[str, Any]) -> Drafts | None:
    """Read the counts in each engine's own spelling: ours and vLLM's, mlx-vlm's, vllm-mlx's."""
    ours = (chunk.get("metrics") or {}).get("speculative_decoding")
    if ours:
        return Drafts(
            steps=ours["num_spec_steps"],
            drafted=ours["num_draft_tokens"],
            accepted=ours["num_accepted_draft_tokens"],
            histogram=tuple(ours["acceptance_histogram"]),
        )
    timings = chunk.get("timings") or {}
    if timings.get("draft_n"):
        return Drafts(
            steps=timings["draft_rounds"],
            drafted=timings["draft_n"],
            accepted=timings["draft_n_accepted"],
        )
    metadata = chunk.get("generation_metadata") or {}
    if metadata.get("mtp_drafts"):
        drafts = metadata["mtp_drafts"]
        return Drafts(steps=drafts, drafted=drafts, accepted=metadata["mtp_accepted"])
    return None
