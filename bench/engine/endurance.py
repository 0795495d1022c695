"""Thousands of requests in a row to one worker: does its memory stay where it was?

`python -m bench.engine.endurance` sends short requests of every kind, a few at a time, to a real
worker over HTTP. After every hundred it waits until nothing runs, and reads what MLX holds and what
the process holds. What is kept of system prompts is bounded by a setting and is shown apart.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from rich.console import Console

from bench.harness.contenders import OURS
from bench.harness.servers import Server, running
from bench.harness.tables import Grid
from workers.demo import CHECKPOINT
from workers.engine.prefix_cache_files import fingerprint

RESULTS: Final = Path(__file__).parents[1] / "results"
SNAPSHOT_BYTES: Final = 8 << 20
SAMPLE_EVERY: Final = 100
AT_ONCE: Final = 6
WARM_UP: Final = 500
"""Requests after which every kind has been seen in every company, and all that grows once has."""
REQUEST_TIMEOUT_S: Final = 120.0
BAR_WIDTH: Final = 20

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a worker holds while nothing runs."""

    requests: int
    active_bytes: int
    """Held by MLX: weights, caches, snapshots."""
    prefix_cache_bytes: int
    resident_bytes: int

    @property
    def steady_bytes(self) -> int:
        """Held by MLX beside the snapshots, which have a bound of their own."""
        return self.active_bytes - self.prefix_cache_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request, and how its answer must end."""

    name: str
    body: Body
    status: int = 200
    leaves: bool = False
    """Whether the client goes away at the first word."""


def kinds(number: int) -> tuple[Kind, ...]:
    """Make one request of every kind; the number makes each a little different."""
    ask = [{"role": "user", "content": f"Count from {number % 7} to {number % 7 + 12}."}]
    story = [{"role": "user", "content": f"Tell me story {number % 5}."}]
    system = {"role": "system", "content": f"You are clerk {number % 40}. " + "Be kind. " * 30}
    red = [{"type": "image_url", "image_url": {"url": _picture()}}]
    look = [{"role": "user", "content": [*red, {"type": "text", "text": "What is this?"}]}]
    long = [{"role": "user", "content": "The red fox sees the old tree. " * 40}]
    greedy: Body = {"temperature": 0, "max_tokens": 8 + number % 17}
    warm: Body = {"temperature": 1.0, "seed": number, "max_tokens": 12}
    return (
        Kind(name="greedy", body={"messages": ask, **greedy}),
        Kind(name="greedy stream", body={"messages": story, **greedy, "stream": True}),
        Kind(name="sampled", body={"messages": story, **warm}),
        Kind(name="system prompt", body={"messages": [system, *ask], **greedy}),
        Kind(name="picture", body={"messages": look, **greedy}),
        Kind(name="stop string", body={"messages": ask, **greedy, "stop": [" 9", "5,"]}),
        Kind(name="penalties", body={"messages": story, **greedy, "frequency_penalty": 1.0}),
        Kind(name="logprobs", body={"messages": ask, **greedy, "logprobs": True}),
        Kind(name="three choices", body={"messages": story, **warm, "n": 3}),
        Kind(name="k of its own", body={"messages": ask, **greedy, "draft_tokens": number % 5}),
        Kind(name="long prompt", body={"messages": long, **greedy}),
        Kind(name="refused", body={"messages": ask, "temperature": 9}, status=400),
        Kind(
            name="client leaves",
            body={"messages": story, **warm, "max_tokens": 200, "stream": True},
            leaves=True,
        ),
    )


async def endure(server: Server, count: int) -> list[Sample]:
    """Send so many requests; raise RuntimeError at the first that does not end as it must."""
    limits = httpx.Limits(max_connections=AT_ONCE + 1)
    async with httpx.AsyncClient(
        base_url=server.url, limits=limits, timeout=REQUEST_TIMEOUT_S
    ) as client:
        samples = [await _sample(client, server, 0)]
        for begin in range(0, count, SAMPLE_EVERY):
            end = min(begin + SAMPLE_EVERY, count)
            numbers = iter(range(begin, end))
            await asyncio.gather(*(_send(client, server, numbers) for _ in range(AT_ONCE)))
            samples.append(await _sample(client, server, end))
            sys.stderr.write(f"{end} requests\n")
    return samples


async def _send(client: httpx.AsyncClient, server: Server, numbers: Any) -> None:
    for number in numbers:
        every = kinds(number)
        kind = every[number % len(every)]
        body = {"model": server.model, **kind.body}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != kind.status:
                raise RuntimeError(f"request {number}, {kind.name}: {answer.status_code}")
            async for _ in answer.aiter_bytes():
                if kind.leaves:
                    break


async def _sample(client: httpx.AsyncClient, server: Server, requests: int) -> Sample:
    """Read the state of the worker once nothing runs in it."""
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
    """List the samples, with a bar for what the process holds."""
    most = max(sample.resident_bytes for sample in samples)

    def row(sample: Sample) -> tuple[str, ...]:
        return (
            "█" * round(BAR_WIDTH * sample.resident_bytes / most),
            str(sample.requests),
            f"{sample.steady_bytes / 1e6:.2f}",
            f"{sample.prefix_cache_bytes / 1e6:.2f}",
            f"{sample.resident_bytes / 1e6:.0f}",
        )

    return Grid(
        title="Memory of one worker over its requests, while nothing runs",
        columns=("process", "requests", "MLX, MB", "system prompts, MB", "process, MB"),
        rows=tuple(row(sample) for sample in samples),
    )


def verdict(samples: Sequence[Sample]) -> str:
    """Say how much the worker grew: after everything was seen once, and in the second half."""
    last = samples[-1]
    halfway = next(sample for sample in samples if 2 * sample.requests >= last.requests)
    warm = next((sample for sample in samples if sample.requests >= WARM_UP), halfway)
    return " ".join(_growth(first, last) for first in (warm, halfway))


def _growth(first: Sample, last: Sample) -> str:
    mlx = last.steady_bytes / first.steady_bytes - 1
    process = last.resident_bytes / first.resident_bytes - 1
    return (
        f"From request {first.requests} to {last.requests}, what MLX holds beside system prompts "
        f"changed by {mlx:+.2%}, the process by {process:+.2%}."
    )


def _picture() -> str:
    """Return a small red picture as a data URL."""
    written = io.BytesIO()
    Image.new("RGB", (64, 64), (220, 30, 30)).save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


async def _run(model: Path, count: int, log: Path) -> list[Sample]:
    bounded = replace(
        OURS, arguments=(*OURS.arguments, "--prefix-cache-bytes", str(SNAPSHOT_BYTES))
    )
    async with running(bounded, python=Path(sys.executable), model=model, log=log) as server:
        return await endure(server, count)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.endurance", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="folder of the demo model")
    parser.add_argument("--count", type=int, default=2000, help="requests to send")
    parser.add_argument(
        "--log", type=Path, default=Path("/dev/null"), help="the worker's own words"
    )
    options = parser.parse_args(arguments)
    samples = asyncio.run(_run(options.model, options.count, options.log))
    grid, grew = table(samples), verdict(samples)
    console = Console(highlight=False)
    console.print(grid.drawn())
    console.print(grew)
    RESULTS.mkdir(exist_ok=True)
    about = (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.system()} {platform.machine()}, "
        f"MLX {version('mlx')}, checkpoint {fingerprint(options.model)[:12]}. "
        f"{options.count} requests of {len(kinds(0))} kinds, {AT_ONCE} at a time: "
        f"{', '.join(kind.name for kind in kinds(0))}. "
        f"System prompts may take {SNAPSHOT_BYTES / 1e6:.1f} MB."
    )
    page = ["# Endurance", about, grew, grid.markdown()]
    (RESULTS / "endurance.md").write_text("\n\n".join(page).rstrip() + "\n")


if __name__ == "__main__":
    main()
