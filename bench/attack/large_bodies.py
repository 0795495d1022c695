"""Large bodies of many shapes, and how long a neighbour's small request waits beside each."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from bench.attack.http_client import CHAT, encode, send
from bench.gateway.backend import MODEL
from bench.gateway.contenders import KEY
from bench.harness.processes import end, start
from tests.support.images import data_url, png_header

NAME: Final = "large bodies"
PROMISE: Final = "a neighbour's request waits at most 50 ms longer (99th percentile)"
_LIMIT_MS: Final = 50.0
_TIMES: Final = 200
"""Requests of the neighbour, at least, beside the bodies of a shape."""
_PAUSE_S: Final = 0.005
_LARGEST: Final = 31 * 1024 * 1024
_CONTAINERS: Final = 99_000
_RESPONSES: Final = "/v1/responses"
_MESSAGES: Final = "/v1/messages"

_USER: Final = {"role": "user", "content": "x" * 20}
_ANSWER: Final = {"role": "assistant", "content": "y"}
_SYSTEM: Final = {"role": "system", "content": "x"}
_TEXT: Final = {"type": "text", "text": "x"}
_CALL: Final = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}


def _chat(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 1, "messages": [*messages], **fields}


def _response(*items: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 1, "input": [*items], "store": False}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


SHAPES: Final[Mapping[str, tuple[str, Callable[[], dict[str, Any]]]]] = {
    "short messages": (CHAT, lambda: _chat(*[_USER] * 9_999)),
    "too many messages": (CHAT, lambda: _chat(*[_USER] * 90_000)),
    "messages by turns": (CHAT, lambda: _chat(*[_USER, _ANSWER] * 4_999)),
    "system messages": (CHAT, lambda: _chat(*[_SYSTEM] * 9_998, _USER)),
    "parts of a message": (CHAT, lambda: _chat(_user([_TEXT] * _CONTAINERS))),
    "lists in metadata": (CHAT, lambda: _chat(_USER, metadata={"x": [[]] * _CONTAINERS})),
    "numbers in metadata": (CHAT, lambda: _chat(_USER, metadata={"x": [1.5] * 990_000})),
    "one long text": (CHAT, lambda: _chat(_user("word " * (_LARGEST // 5)))),
    "line feeds": (CHAT, lambda: _chat(_user("\n" * 1_490_000))),
    "text beyond ASCII": (CHAT, lambda: _chat(_user("\u20ac" * 4_000_000))),
    "one large picture": (
        CHAT,
        lambda: _chat(
            _user([{"type": "image_url", "image_url": {"url": _picture(_LARGEST)}}, _TEXT])
        ),
    ),
    "items": (_RESPONSES, lambda: _response(*[_USER] * 9_999)),
    "system items": (_RESPONSES, lambda: _response(*[_SYSTEM] * 9_998, _USER)),
    "calls": (_RESPONSES, lambda: _response(*[_CALL] * 9_998, _USER)),
    "blocks": (_MESSAGES, lambda: _chat(_user([_TEXT] * _CONTAINERS))),
    "users": (_MESSAGES, lambda: _chat(*[_USER] * 9_999)),
    "explained": ("/v1/route/explain", lambda: _chat(*[_USER] * 9_999)),
}
"""Each with the path that it is sent to."""


class Wait(NamedTuple):
    """A neighbour's times beside the bodies of one shape."""

    shape: str
    megabytes: float
    statuses: str
    seconds: float
    """Of one body, at the median."""
    p99_ms: float
    longer_ms: float
    """By how much that exceeds the time without them."""

    @property
    def held(self) -> bool:
        """Return whether the neighbour waited no longer than promised."""
        return self.longer_ms <= _LIMIT_MS


async def measure(port: int, shapes: Mapping[str, Any] = SHAPES) -> list[Wait]:
    """Send bodies of each shape one after another, beside a neighbour in this process."""
    small = encode(json.dumps(_chat(_USER)).encode(), key=KEY)
    alone_ms = _p99_ms([await _ask(port, small) for _ in range(_TIMES)])
    waits = []
    for shape in shapes:
        flood = await start(
            sys.executable,
            "-m",
            "bench.attack.large_bodies",
            str(port),
            shape,
            stdout=subprocess.PIPE,
        )
        assert flood.stdout is not None
        answers: list[dict[str, Any]] = []

        async def read(lines: asyncio.StreamReader, answers: list[dict[str, Any]]) -> None:
            async for line in lines:
                answers.append(json.loads(line))

        reading = asyncio.create_task(read(flood.stdout, answers))
        times: list[float] = []
        try:
            while not answers:  # the first line says that the body is made
                await asyncio.sleep(_PAUSE_S)
            while len(times) < _TIMES or len(answers) < 3:
                times.append(await _ask(port, small))
                await asyncio.sleep(_PAUSE_S)
        finally:
            reading.cancel()
            await end(flood)
        made, *sent = answers
        p99_ms = _p99_ms(times)
        waits.append(
            Wait(
                shape,
                made["bytes"] / 1e6,
                ", ".join(sorted({one["answer"] for one in sent})),
                median(one["seconds"] for one in sent),
                p99_ms,
                p99_ms - alone_ms,
            )
        )
        print(waits[-1])
    return waits


def flood(port: int, shape: str) -> None:
    """Send bodies of a shape one after another; print a line for each answer."""
    path, make = SHAPES[shape]
    body = json.dumps(make(), ensure_ascii=False, separators=(",", ":")).encode()
    raw = encode(body, path=path, key=KEY)
    print(json.dumps({"bytes": len(body)}), flush=True)
    while True:
        began_s = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(raw)
            answer = connection.makefile("rb").read()
        status, error = answer.split(b" ", 2)[1].decode(), re.search(rb'"code":"([^"]*)"', answer)
        line = {
            "answer": f"{status} {error[1].decode()}" if error else status,
            "seconds": time.perf_counter() - began_s,
        }
        print(json.dumps(line), flush=True)


async def _ask(port: int, raw: bytes) -> float:
    began_s = time.perf_counter()
    answer = await send(port, raw)
    assert answer.status == 200, answer
    return time.perf_counter() - began_s


def _p99_ms(times: list[float]) -> float:
    return 1000 * quantiles(times, n=100, method="inclusive")[98]


def _picture(size: int) -> str:
    head = data_url(png_header(8, 8))
    return head + "A" * (size // 4 * 4)


if __name__ == "__main__":
    flood(int(sys.argv[1]), sys.argv[2])
