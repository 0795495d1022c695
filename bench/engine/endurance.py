"""Memory of one worker over thousands of requests.

`python -m bench.engine.endurance` sends short requests of every kind to a real worker over HTTP, a
few at a time. After each hundred it waits until no request runs, and samples the memory of MLX and
of the process. The prefix cache has a separate limit and column.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from rich.console import Console

from bench.harness.contenders import OURS
from bench.harness.servers import Server, running
from bench.harness.tables import Grid, provenance, write_page
from workers.demo import CHECKPOINT
from workers.engine.prefix.files import fingerprint

RESULTS: Final = Path(__file__).parents[1] / "results"
PREFIX_CACHE_BYTES: Final = 8 << 20
SAMPLE_EVERY: Final = 100
CONCURRENCY: Final = 6
WARM_UP: Final = 500
"""Requests after which every kind has run with every other, and one-time growth has ended."""
REQUEST_TIMEOUT_S: Final = 120.0
BAR_WIDTH: Final = 20

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The memory of an idle worker."""

    requests: int
    active_bytes: int
    """Memory of MLX: weights, caches and cached prefixes."""
    prefix_cache_bytes: int
    resident_bytes: int

    @property
    def steady_bytes(self) -> int:
        """Return the memory of MLX without cached prefixes, which have a separate limit."""
        return self.active_bytes - self.prefix_cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request, and the expected end of its answer."""

    name: str
    body: Body
    status: int = 200
    disconnects: bool = False
    """Whether the client disconnects at the first byte."""


def kinds(number: int) -> tuple[Kind, ...]:
    """Return one request of every kind; the number varies each of them."""
    count = [{"role": "user", "content": f"Count from {number % 7} to {number % 7 + 12}."}]
    story = [{"role": "user", "content": f"Tell me story {number % 5}."}]
    system = {"role": "system", "content": f"You are clerk {number % 40}. " + "Be kind. " * 30}
    red = [{"type": "image_url", "image_url": {"url": _picture()}}]
    picture = [{"role": "user", "content": [*red, {"type": "text", "text": "What is this?"}]}]
    long = [{"role": "user", "content": "The red fox sees the old tree. " * 40}]
    greedy: Body = {"temperature": 0, "max_tokens": 8 + number % 17}
    sampled: Body = {"temperature": 1.0, "seed": number, "max_tokens": 12}
    return (
        Kind(name="greedy", body={"messages": count, **greedy}),
        Kind(name="greedy stream", body={"messages": story, **greedy, "stream": True}),
        Kind(name="sampled", body={"messages": story, **sampled}),
        Kind(name="system prompt", body={"messages": [system, *count], **greedy}),
        Kind(name="picture", body={"messages": picture, **greedy}),
        Kind(name="stop string", body={"messages": count, **greedy, "stop": [" 9", "5,"]}),
        Kind(name="penalties", body={"messages": story, **greedy, "frequency_penalty": 1.0}),
        Kind(name="logprobs", body={"messages": count, **greedy, "logprobs": True}),
        Kind(name="three choices", body={"messages": story, **sampled, "n": 3}),
        Kind(name="explicit k", body={"messages": count, **greedy, "draft_tokens": number % 5}),
        Kind(name="long prompt", body={"messages": long, **greedy}),
        Kind(name="rejected", body={"messages": count, "temperature": 9}, status=400),
        Kind(
            name="client disconnects",
            body={"messages": story, **sampled, "max_tokens": 200, "stream": True},
            disconnects=True,
        ),
    )


async def endure(server: Server, count: int) -> list[Sample]:
    """Send requests; raise RuntimeError at the first one with an unexpected end."""
    limits = httpx.Limits(max_connections=CONCURRENCY + 1)
    async with httpx.AsyncClient(
        base_url=server.url, limits=limits, timeout=REQUEST_TIMEOUT_S
    ) as client:
        samples = [await _sample(client, server, 0)]
        for begin in range(0, count, SAMPLE_EVERY):
            end = min(begin + SAMPLE_EVERY, count)
            numbers = iter(range(begin, end))
            await asyncio.gather(*(_send(client, server, numbers) for _ in range(CONCURRENCY)))
            samples.append(await _sample(client, server, end))
            sys.stderr.write(f"{end} requests\n")
    return samples


async def _send(client: httpx.AsyncClient, server: Server, numbers: Any) -> None:
    for number in numbers:
        all_kinds = kinds(number)
        kind = all_kinds[number % len(all_kinds)]
        body = {"model": server.model, **kind.body}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != kind.status:
                raise RuntimeError(f"request {number}, {kind.name}: {response.status_code}")
            async for _ in response.aiter_bytes():
                if kind.disconnects:
                    break


async def _sample(client: httpx.AsyncClient, server: Server, requests: int) -> Sample:
    """Wait until the worker is idle and return its memory."""
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        while True:
            report = (await client.get("/v1/status")).json()["report"]
            if not any(lane["running"] + lane["waiting"] for lane in report["lanes"]):
                break
            await asyncio.sleep(0.05)
    return Sample(
        requests=requests,
        active_bytes=report["memory_bytes"],
        prefix_cache_bytes=report["prefix_cache_bytes"],
        resident_bytes=server.resident_bytes(),
    )


def table(samples: Sequence[Sample]) -> Grid:
    """Return the samples as a table, with a bar for the memory of the process."""
    maximum_bytes = max(sample.resident_bytes for sample in samples)

    def row(sample: Sample) -> tuple[str, ...]:
        return (
            "█" * round(BAR_WIDTH * sample.resident_bytes / maximum_bytes),
            str(sample.requests),
            f"{sample.steady_bytes / 1e6:.2f}",
            f"{sample.prefix_cache_bytes / 1e6:.2f}",
            f"{sample.resident_bytes / 1e6:.0f}",
        )

    return Grid(
        title="Memory of one idle worker over its requests",
        columns=("process", "requests", "MLX, MB", "system prompts, MB", "process, MB"),
        rows=tuple(row(sample) for sample in samples),
    )


def growth_text(samples: Sequence[Sample]) -> str:
    """Return how much the worker grew after the warm-up, and in the second half."""
    last = samples[-1]
    halfway = next(sample for sample in samples if 2 * sample.requests >= last.requests)
    warmed_up = next((sample for sample in samples if sample.requests >= WARM_UP), halfway)
    return " ".join(_growth_between(first, last) for first in (warmed_up, halfway))


def _growth_between(first: Sample, last: Sample) -> str:
    mlx = last.steady_bytes / first.steady_bytes - 1
    process = last.resident_bytes / first.resident_bytes - 1
    return (
        f"From request {first.requests} to {last.requests}, the memory of MLX without system "
        f"prompts changed by {mlx:+.2%}, the process by {process:+.2%}."
    )


def _picture() -> str:
    """Return a small red picture as a data URL."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), (220, 30, 30)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


async def _run(model: Path, count: int, log: Path) -> list[Sample]:
    limited = replace(
        OURS, arguments=(*OURS.arguments, "--prefix-cache-bytes", str(PREFIX_CACHE_BYTES))
    )
    async with running(limited, python=Path(sys.executable), model=model, log=log) as server:
        return await endure(server, count)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.endurance", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the demo model")
    parser.add_argument("--count", type=int, default=2000, help="requests to send")
    parser.add_argument(
        "--log", type=Path, default=Path("/dev/null"), help="file for the log of the worker"
    )
    options = parser.parse_args(arguments)
    samples = asyncio.run(_run(options.model, options.count, options.log))
    grid, growth = table(samples), growth_text(samples)
    console = Console(highlight=False)
    console.print(grid.to_table())
    console.print(growth)
    metadata = (
        f"{provenance()}, MLX {version('mlx')}, checkpoint {fingerprint(options.model)[:12]}. "
        f"{options.count} requests of {len(kinds(0))} kinds, {CONCURRENCY} at a time: "
        f"{', '.join(kind.name for kind in kinds(0))}. "
        f"System prompts may use {PREFIX_CACHE_BYTES / 1e6:.1f} MB."
    )
    write_page(RESULTS / "endurance.md", "Endurance", metadata, growth, grid)


if __name__ == "__main__":
    main()
