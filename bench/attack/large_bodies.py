"""Large bodies of many shapes, and how long a neighbour's small request waits beside each."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from bench.attack.http_client import CHAT, encode, send
from bench.gateway.backend import MODEL
from bench.gateway.contenders import KEY
from bench.harness.processes import end, start
from bench.harness.tables import Grid, Target
from tests.support.images import data_url, png_header

NAME: Final = "large bodies"
_LIMIT_MS: Final = 50.0
_TIMES: Final = 200
"""Requests of the neighbour, at least, beside the bodies of a shape."""
_ANSWERS: Final = 3
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
    "a letter beyond ASCII": (CHAT, lambda: _chat(_user("x" * 8_388_600 + "\u20ac"))),
    "medium texts": (CHAT, lambda: _chat(_user([{**_TEXT, "text": "word " * 20_000}] * 310))),
    "pictures": (
        CHAT,
        lambda: _chat(
            _user([{"type": "image_url", "image_url": {"url": _picture(_LARGEST // 32)}}] * 32)
        ),
    ),
    "long arguments": (
        CHAT,
        lambda: _chat(
            _USER,
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "f", "arguments": f'{{"x":"{"word " * 5_000_000}"}}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": '"field": ' * 700_000},
        ),
    ),
    "items": (_RESPONSES, lambda: _response(*[_USER] * 9_999)),
    "system items": (_RESPONSES, lambda: _response(*[_SYSTEM] * 9_998, _USER)),
    "calls": (_RESPONSES, lambda: _response(*[_CALL] * 9_998, _USER)),
    "long output": (
        _RESPONSES,
        lambda: _response(
            {**_CALL, "arguments": json.dumps({"x": "word " * 3_000_000})},
            {"type": "function_call_output", "call_id": "c", "output": "word " * 3_000_000},
        ),
    ),
    "blocks": (_MESSAGES, lambda: _chat(_user([_TEXT] * _CONTAINERS))),
    "long blocks": (
        _MESSAGES,
        lambda: _chat(
            _user([{**_TEXT, "text": "word " * 20_000}] * 150),
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "c",
                        "name": "f",
                        "input": {"x": ["word " * 20_000] * 150},
                    }
                ],
            },
            _user([{"type": "tool_result", "tool_use_id": "c", "content": "x"}]),
        ),
    ),
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


async def measure(port: int, *, quick: bool) -> list[Wait]:
    """Send bodies of each shape one after another, beside a neighbour in this process."""
    small = encode(json.dumps(_chat(_USER)).encode(), key=KEY)
    times = 20 if quick else _TIMES
    alone_ms = _p99_ms([await _ask(port, small) for _ in range(times)])
    waits = []
    for shape in tuple(SHAPES)[:2] if quick else SHAPES:
        command = (sys.executable, "-m", "bench.attack.large_bodies", str(port), shape)
        process = await start(*command, stdout=subprocess.PIPE)
        answers: list[dict[str, Any]] = []
        try:
            assert process.stdout is not None
            made = json.loads(await process.stdout.readline())
            reading = asyncio.create_task(_read(process.stdout, answers))
            beside: list[float] = []
            while len(beside) < times or len(answers) < _ANSWERS:
                beside.append(await _ask(port, small))
                await asyncio.sleep(_PAUSE_S)
            reading.cancel()
        finally:
            await end(process)
        p99_ms = _p99_ms(beside)
        waits.append(
            Wait(
                shape,
                made["bytes"] / 1e6,
                ", ".join(sorted({one["answer"] for one in answers})),
                median(one["seconds"] for one in answers),
                p99_ms,
                p99_ms - alone_ms,
            )
        )
    return waits


async def _read(lines: asyncio.StreamReader, answers: list[dict[str, Any]]) -> None:
    async for line in lines:
        answers += [json.loads(line)]


async def _ask(port: int, raw: bytes) -> float:
    began_s = time.perf_counter()
    answer = await send(port, raw)
    assert answer.status == 200, answer
    return time.perf_counter() - began_s


def _p99_ms(times: list[float]) -> float:
    return 1000 * quantiles(times, n=100, method="inclusive")[98]


def table(waits: Sequence[Wait]) -> Grid:
    """Return the wait beside each shape."""
    return Grid(
        title="Large bodies of one client, one after another, and the wait of its neighbour",
        columns=("shape", "MB", "answers", "seconds", "neighbour p99, ms", "longer, ms"),
        rows=tuple(
            (
                wait.shape,
                f"{wait.megabytes:.1f}",
                wait.statuses,
                f"{wait.seconds:.2f}",
                f"{wait.p99_ms:.1f}",
                f"{wait.longer_ms:+.1f}",
            )
            for wait in waits
        ),
    )


def targets(waits: Sequence[Wait]) -> list[Target]:
    """Return the bound of each wait."""
    return [
        Target(
            name=f"{NAME}, {wait.shape}: neighbour waits longer, ms",
            reached=wait.longer_ms,
            bound=_LIMIT_MS,
            at_least=False,
        )
        for wait in waits
    ]


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


def _picture(size: int) -> str:
    return data_url(png_header(8, 8)) + "A" * (size // 4 * 4)


if __name__ == "__main__":
    flood(int(sys.argv[1]), sys.argv[2])
