"""The streams of the benchmark, and whether two of them are equal."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.support.failover_fleet import CHAT, Answer, check_drafts

KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
}
_WORKER: Final = re.compile(rb"^: x-paceline-worker: (\w+)\n", re.MULTILINE)


def body_of(kind: str, *, number: int = 0, max_tokens: int = 160) -> dict[str, Any]:
    """Return a request whose answer is long; each number has a prompt of its own."""
    story = "The red fox sees the old tree and the blue boat finds the warm stone. " * 6
    return {
        "model": "demo",
        "messages": [
            {"role": "system", "content": f"You are clerk {number}. {story}"},
            {"role": "user", "content": "Count from 1 to 120."},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        **KINDS[kind],
    }


@dataclass(slots=True)
class Comparison:
    """How many streams were equal to those without a failure."""

    streams: int = 0
    equal: int = 0
    unlike: list[str] = field(default_factory=list)

    def add(self, name: str, answer: Answer, expected: Answer) -> bool:
        """Compare one stream, its usage and its draft counts; return whether all are right."""
        self.streams += 1
        differing = [key for key, value in answer.facts.items() if value != expected.facts[key]]
        if len(answer.ids) != 1 or len(answer.created) != 1:
            differing.append("ids")
        try:
            check_drafts(answer)
        except AssertionError:
            differing.append("draft counts")
        self.equal += not differing
        if differing:
            self.unlike.append(f"{name}: {', '.join(differing)} {answer.error}".strip())
        return not differing


async def near_tie(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], answer: Answer, expected: Answer
) -> str:
    """Return how near the two likeliest tokens are where two greedy texts part."""
    texts = zip(answer.texts.get(0, ""), expected.texts.get(0, ""), strict=False)
    at = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], texts))
    fields = {"stream": False, "stream_options": None, "logprobs": True, "top_logprobs": 2}
    response = await client.post(url + CHAT, json={**body, **fields})
    read = 0
    for one in response.json()["choices"][0]["logprobs"]["content"]:
        read += len(one["token"])
        if read > at:
            first, second = (other["logprob"] for other in one["top_logprobs"])
            return (
                f"they part at character {at}, where the two tokens are {first - second:.2g} apart"
            )
    return f"they part at character {at}"


@dataclass(slots=True)
class FailingStream:
    """A stream whose worker fails, as its client sees it."""

    worker: str = ""
    """The one that begins it."""
    received: bytes = b""
    failed_s: float = 0.0
    """When the worker failed; 0 if the stream ended before."""
    next_s: float = 0.0
    """When the first text of the next worker came; 0 if none came."""

    @property
    def moved(self) -> re.Match[bytes] | None:
        """Return the comment that names the worker that goes on."""
        return _WORKER.search(self.received)

    @property
    def gap_s(self) -> float:
        return self.next_s - self.failed_s

    def add(self, piece: bytes) -> None:
        now_s = time.perf_counter()
        self.received += piece
        if self.failed_s and not self.next_s and (moved := self.moved):
            self.next_s = now_s if has_text(self.received[moved.end() :]) else 0.0


def has_text(received: bytes) -> bool:
    """Return whether text of an answer stands in these bytes of a stream."""
    return received.count(b'"content":"') > received.count(b'"content":""')


async def stream_and_fail(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    after: int,
    fail: Callable[[str], Awaitable[None]],
) -> FailingStream:
    """Stream an answer, and let its worker fail after so many events with text."""
    stream = FailingStream()
    async with client.stream("POST", CHAT, json=body) as response:
        stream.worker = response.headers.get("x-paceline-worker", "")
        async for piece in response.aiter_raw():
            stream.add(piece)
            if not stream.failed_s and stream.received.count(b'"content":"') > after:
                await fail(stream.worker)
                stream.failed_s = time.perf_counter()
    return stream
