"""Memory of one worker over thousands of requests.

`python -m bench.engine.endurance` sends short requests of every kind to a real worker over HTTP, a
few at a time. After each hundred it waits until no request runs, and samples the memory of MLX and
of the process. The prefix cache has a separate limit and column.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import httpx
from PIL import Image

from bench.harness.chat import user
from bench.harness.contenders import OURS
from bench.harness.options import parser
from bench.harness.servers import Server, running_engine
from bench.harness.tables import Grid, bar, provenance, report
from tests.support.images import encode_image
from workers.engine.prefix.files import fingerprint

_PREFIX_CACHE_BYTES: Final = 8 << 20
_SAMPLE_EVERY: Final = 100
_CONCURRENCY: Final = 6
_WARM_UP: Final = 500
"""Requests after which every kind has run with every other, and one-time growth has ended."""
_TIMEOUT_S: Final = 120.0
_REJECTED: Final = "rejected"
_LEAVES: Final = "client disconnects"
"""At the first byte."""
_PICTURE: Final = encode_image(Image.new("RGB", (64, 64), (220, 30, 30)))


class Sample(NamedTuple):
    """The memory of an idle worker, in bytes."""

    requests: int
    mlx: int
    """Without cached prefixes, which have a separate limit."""
    prefix_cache: int
    process: int


def kinds(number: int) -> dict[str, Mapping[str, Any]]:
    """Return one request of every kind; the number varies each of them."""
    count = {"messages": [user(f"Count from {number % 7} to {number % 7 + 12}.")]}
    story = {"messages": [user(f"Tell me story {number % 5}.")]}
    system = {"role": "system", "content": f"You are clerk {number % 40}. " + "Be kind. " * 30}
    red = {"type": "image_url", "image_url": {"url": _PICTURE}}
    picture = [user([red, {"type": "text", "text": "What is this?"}])]
    greedy = {"temperature": 0, "max_tokens": 8 + number % 17}
    sampled = {"temperature": 1.0, "seed": number, "max_tokens": 12}
    return {
        "greedy": {**count, **greedy},
        "greedy stream": {**story, **greedy, "stream": True},
        "sampled": {**story, **sampled},
        "system prompt": {"messages": [system, *count["messages"]], **greedy},
        "picture": {"messages": picture, **greedy},
        "stop string": {**count, **greedy, "stop": [" 9", "5,"]},
        "penalties": {**story, **greedy, "frequency_penalty": 1.0},
        "logprobs": {**count, **greedy, "logprobs": True},
        "three choices": {**story, **sampled, "n": 3},
        "explicit k": {**count, **greedy, "draft_tokens": number % 5},
        "long prompt": {"messages": [user("The red fox sees the old tree. " * 40)], **greedy},
        _REJECTED: {**count, "temperature": 9},
        _LEAVES: {**story, **sampled, "max_tokens": 200, "stream": True},
    }


async def endure(server: Server, count: int) -> list[Sample]:
    """Send requests; raise RuntimeError at the first one with an unexpected end."""
    limits = httpx.Limits(max_connections=_CONCURRENCY + 1)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=_TIMEOUT_S) as client:
        samples = [await _sample(client, server, 0)]
        for begin in range(0, count, _SAMPLE_EVERY):
            end = min(begin + _SAMPLE_EVERY, count)
            numbers = iter(range(begin, end))
            await asyncio.gather(*(_send(client, server, numbers) for _ in range(_CONCURRENCY)))
            samples.append(await _sample(client, server, end))
            sys.stderr.write(f"{end} requests\n")
    return samples


async def _send(client: httpx.AsyncClient, server: Server, numbers: Iterator[int]) -> None:
    for number in numbers:
        bodies = kinds(number)
        kind = [*bodies][number % len(bodies)]
        body = {"model": server.model, **bodies[kind]}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != (400 if kind == _REJECTED else 200):
                raise RuntimeError(f"request {number}, {kind}: {response.status_code}")
            async for _ in response.aiter_bytes():
                if kind == _LEAVES:
                    break


async def _sample(client: httpx.AsyncClient, server: Server, requests: int) -> Sample:
    """Wait until the worker is idle and return its memory."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            told = (await client.get("/v1/status")).json()["report"]
            if not any(lane["running"] + lane["waiting"] for lane in told["lanes"]):
                break
            await asyncio.sleep(0.05)
    cached = told["prefix_cache_bytes"]
    return Sample(requests, told["memory_bytes"] - cached, cached, server.resident_bytes())


def growth_text(samples: Sequence[Sample]) -> str:
    """Return how much the worker grew after the warm-up, and in the second half."""
    last = samples[-1]
    halfway = next(one for one in samples if 2 * one.requests >= last.requests)
    warmed_up = next((one for one in samples if one.requests >= _WARM_UP), halfway)
    return " ".join(
        f"From request {first.requests} to {last.requests}, the memory of MLX without system "
        f"prompts changed by {last.mlx / first.mlx - 1:+.2%}, the process by "
        f"{last.process / first.process - 1:+.2%}."
        for first in (warmed_up, halfway)
    )


async def run(options: Any) -> list[Sample]:
    command = f"{OURS.command} --prefix-cache-bytes {_PREFIX_CACHE_BYTES}"
    limited = replace(OURS, command=command)
    log = "endurance"
    async with running_engine(limited, options.folder, model=options.model, log=log) as server:
        return await endure(server, options.count)


def main() -> None:
    made = parser("engine.endurance", __doc__, quick=False, model=True)
    made.add_argument("--count", type=int, default=2000, help="requests to send")
    options = made.parse_args()
    samples = asyncio.run(run(options))
    most = max(sample.process for sample in samples)
    rows = [
        (
            bar(one.process, most),
            one.requests,
            *(f"{value / 1e6:.2f}" for value in (one.mlx, one.prefix_cache)),
            f"{one.process / 1e6:.0f}",
        )
        for one in samples
    ]
    columns = ("process", "requests", "MLX, MB", "system prompts, MB", "process, MB")
    about = (
        f"{provenance()}, MLX {version('mlx')}, checkpoint {fingerprint(options.model)[:12]}. "
        f"{options.count} requests of {len(kinds(0))} kinds, {_CONCURRENCY} at a time: "
        f"{', '.join(kinds(0))}. System prompts may use {_PREFIX_CACHE_BYTES / 1e6:.1f} MB."
    )
    grid = Grid("Memory of one idle worker over its requests", columns, rows)
    report("endurance.md", "Endurance", about, growth_text(samples), grid)


if __name__ == "__main__":
    main()
