"""Streams that go on at another worker: real workers killed, connections cut, and the price.

`python -m bench.failover` kills workers with the demo model while they stream, and cuts their
connections at chosen bytes by a proxy; each stream must equal the one without a failure. It
measures the first token after a kill, and the CPU time of the gateway per event while nobody dies.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from bench.attack.stack import JOIN_TOKEN, Part, fixed_port, gateway_part, wait_until_up
from bench.failover.price import measure_price
from bench.gateway.contenders import gateway_parser
from gateway.server import run
from tests.support.failover_fleet import CHAT, Answer, check_drafts, running_fleet
from tests.support.fault_proxy import Fault
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.types import EngineSettings

RESULTS: Final = Path(__file__).parents[1] / "results" / "failover.md"
_WORKERS: Final = ("a", "b")
_READY_S: Final = 300.0
_BODY: Final = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 120."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 160,
}
_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1, "seed": 7},
}


@dataclass(slots=True, kw_only=True)
class Results:
    """What was seen."""

    streams: int = 0
    equal: int = 0
    unlike: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    """From a kill to the next token."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A gateway and two workers as processes."""

    port: int
    workers: dict[str, Part]

    async def wait_until_joined(self, client: httpx.AsyncClient) -> None:
        """Wait until both workers have joined."""
        headers = {"authorization": f"Bearer {JOIN_TOKEN}"}
        async with asyncio.timeout(_READY_S):
            for name in self.workers:
                path = f"/admin/v1/workers/{name}/joined"
                joined = False
                while not joined:
                    response = await client.get(path, headers=headers)
                    if not (joined := response.status_code == httpx.codes.OK):
                        await asyncio.sleep(0.1)


@asynccontextmanager
async def running_processes(home: Path) -> AsyncIterator[Fleet]:
    """Run a gateway and two workers with the demo model."""
    port = fixed_port()
    gateway = gateway_part(home, port)
    workers = {}
    for name in _WORKERS:
        arguments = ("-m", "workers", "--model", str(CHECKPOINT), "--port", "0", "--id", name)
        joining = ("--prefix-cache-gb", "0", "--join", f"http://127.0.0.1:{port}")
        workers[name] = Part(
            f"worker-{name}", (*arguments, *joining), home, PACELINE_JOIN_TOKEN=JOIN_TOKEN
        )
    parts = [gateway, *workers.values()]
    try:
        for part in parts:
            await part.start()
        await wait_until_up(port)
        yield Fleet(port=port, workers=workers)
    finally:
        for part in reversed(parts):
            await part.stop()


async def kill_workers(kills: int, rng: random.Random, home: Path) -> Results:
    """Kill the worker of a stream after a random number of events, again and again."""
    results = Results()
    async with running_processes(home) as fleet:
        url = f"http://127.0.0.1:{fleet.port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await fleet.wait_until_joined(client)
            whole = {}
            for kind, fields in _KINDS.items():
                response = await client.post(CHAT, json={**_BODY, **fields})
                whole[kind] = Answer().read(response.content)
            for number in range(kills):
                kind = list(_KINDS)[number % len(_KINDS)]
                answer, gap_s, killed = await _stream_and_kill(client, fleet, kind, rng)
                _compare(results, f"kill {number} {kind}", answer, whole[kind])
                if gap_s is not None:
                    results.gaps_s.append(gap_s)
                await fleet.workers[killed].start()
                await fleet.wait_until_joined(client)
    return results


async def _stream_and_kill(
    client: httpx.AsyncClient, fleet: Fleet, kind: str, rng: random.Random
) -> tuple[Answer, float | None, str]:
    """Stream one answer and kill its worker; return also the pause, and the worker."""
    body = {**_BODY, **_KINDS[kind]}
    received, events, after = b"", 0, rng.randrange(1, 60)
    killed_s = gap_s = None
    async with client.stream("POST", CHAT, json=body) as response:
        worker = response.headers["x-paceline-worker"]
        async for piece in response.aiter_raw():
            received += piece
            if killed_s is not None and gap_s is None and b'"content"' in piece:
                gap_s = time.perf_counter() - killed_s
            events += piece.count(b"data: ")
            if killed_s is None and events >= after:
                killed_s = time.perf_counter()
                await fleet.workers[worker].kill()
    if killed_s is None:
        await fleet.workers[worker].kill()
    return Answer().read(received), gap_s, worker


async def cut_streams(cuts: int, rng: random.Random, home: Path) -> Results:
    """Cut the connection of a stream at a random byte, again and again."""
    results = Results()
    engine = await asyncio.to_thread(
        Engine.start, EngineSettings(model=CHECKPOINT, served_name="demo")
    )
    try:
        async with running_fleet(engine, home) as fleet:
            bodies = {kind: {**_BODY, **fields} for kind, fields in _KINDS.items()}
            whole = {kind: (await fleet.ask(CHAT, body)).content for kind, body in bodies.items()}
            for number in range(cuts):
                kind = list(_KINDS)[number % len(_KINDS)]
                at = rng.randrange(1, len(whole[kind]) * 5 // 4)
                first = "ab"[number // 2 % 2]
                response = await fleet.ask(
                    CHAT, bodies[kind], Fault(reset_after_bytes=at), first=first
                )
                answer = Answer().read(response.content)
                _compare(results, f"cut at {at} {kind}", answer, Answer().read(whole[kind]))
    finally:
        await asyncio.to_thread(engine.stop)
    return results


def _compare(results: Results, name: str, answer: Answer, expected: Answer) -> None:
    results.streams += 1
    if answer.facts == expected.facts:
        results.equal += 1
        check_drafts(answer)
    else:
        differing = [key for key, value in answer.facts.items() if value != expected.facts[key]]
        results.unlike.append(f"{name}: {', '.join(differing)} {answer.error}")


def lines(kills: Results, cuts: Results, price: Mapping[str, float], turns: int) -> Sequence[str]:
    """Return the page of results."""
    without, told = price["without lines"], price["with lines"]
    page = [
        "## Streams that go on at another worker",
        "",
        f"- {kills.streams} kills of real workers: {kills.equal} streams equal",
        f"- {cuts.streams} cuts at a chosen byte: {cuts.equal} streams equal",
        f"- CPU per event of paced streams, medians of {turns} turns: {without * 1e6:.2f} us, and "
        f"{told * 1e6:.2f} us with the lines that tell tokens ({told / without - 1:+.1%})",
    ]
    if gaps := sorted(kills.gaps_s):
        worst = f"median {median(gaps):.3f} s, worst {gaps[-1]:.3f} s"
        page.append(f"- from a kill to the next token: {worst}")
    return [*page, *(f"- unlike: {one}" for one in (*kills.unlike, *cuts.unlike))]


async def measure(options: argparse.Namespace) -> Sequence[str]:
    """Run all parts one after another."""
    rng = random.Random(options.seed)  # chooses places to cut
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home:
        kills = await kill_workers(options.kills, rng, Path(home))
        cuts = await cut_streams(options.cuts, rng, Path(home))
    price = await measure_price(options.turns, options.log_dir)
    return lines(kills, cuts, price, options.turns)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = gateway_parser("bench.failover", __doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--cuts", type=int, default=900)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args(arguments)
    if options.quick:
        options.kills, options.cuts, options.turns = 2, 4, 1
    page = "\n".join(run(measure(options))) + "\n"
    sys.stdout.write(page)
    if not options.quick:
        RESULTS.write_text(page)


if __name__ == "__main__":
    main()
