"""CPU cost of the gateway, compared with nginx, two routers in Rust and LiteLLM in one run.

`python -m bench.gateway` makes a virtual environment for each peer and starts all of them in front
of one worker that answers faster than any of them proxies. Each repetition measures them in another
order. Our gateway runs with a key and all defaults (policy, accounting, metrics); its peers run
without keys. CPU time is that of the process and its children.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import cpu_count
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.gateway import backend
from bench.gateway import tables as gateway_tables
from bench.gateway.contenders import OURS, PEERS, Running, running, running_backend
from bench.gateway.load import Question, Wire, WrongAnswer, send_requests, send_staggered
from bench.harness.process_cost import cpu_s
from bench.harness.samples import Samples
from bench.harness.venvs import PeerUnavailable
from gateway.event_loop import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "gateway.md"
_PEER_NAMES: Final = ",".join(peer.name for peer in PEERS)
_CONCURRENCY: Final = 16
_UNSTREAMED: Final = Question(stream=False)
_STREAM: Final = Question(stream=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a run."""

    repetitions: int
    requests: int
    streams: int
    """Concurrent streams, paced and staggered."""
    rounds: int
    """Repetitions of each stream."""
    budget_s: float
    """The longest time for one metric of one gateway in a repetition."""


FULL: Final = Plan(repetitions=5, requests=3000, streams=50, rounds=5, budget_s=20)
QUICK: Final = Plan(repetitions=1, requests=60, streams=50, rounds=1, budget_s=3)


async def measure_all(
    plan: Plan, names: Sequence[str], venvs: Path, console: Console
) -> dict[str, Samples]:
    """Measure the worker without a gateway, our gateway and the peers of these names."""
    samples = {name: Samples() for name in (gateway_tables.DIRECT, OURS.name, *names)}
    async with AsyncExitStack() as stack:
        worker_port = await stack.enter_async_context(running_backend())
        gateways = [Running(name=gateway_tables.DIRECT, port=worker_port, process_id=None)]
        for contender in (OURS, *(peer for peer in PEERS if peer.name in names)):
            console.print(f"starting {contender.name}, installing it if it is missing")
            try:
                started = running(contender, venvs=venvs, worker_port=worker_port)
                gateways.append(await stack.enter_async_context(started))
            except PeerUnavailable as reason:
                samples[contender.name].failures["start"] = str(reason)
        for repetition in range(plan.repetitions):
            first = repetition % len(gateways)
            for gateway in (*gateways[first:], *gateways[:first]):
                console.print(f"{repetition + 1}/{plan.repetitions} {gateway.name}")
                await _measure(gateway, plan, samples[gateway.name])
    return samples


async def _measure(gateway: Running, plan: Plan, samples: Samples) -> None:
    try:
        questions = {"unstreamed": _UNSTREAMED, "stream": _STREAM}
        if gateway.name == OURS.name:
            for wire in (Wire.MESSAGES, Wire.RESPONSES):
                questions[f"{wire}_unstreamed"] = replace(_UNSTREAMED, wire=wire)
                questions[f"{wire}_stream"] = replace(_STREAM, wire=wire)
        for name, question in questions.items():
            await send_requests(
                gateway.port,
                question,
                requests=plan.requests // 10,
                concurrency=_CONCURRENCY,
                budget_s=5,
            )
            before_s = _cpu_s(gateway)
            completed = await send_requests(
                gateway.port,
                question,
                requests=plan.requests,
                concurrency=_CONCURRENCY,
                budget_s=plan.budget_s,
            )
            samples.add(f"{name}_cpu_s", (_cpu_s(gateway) - before_s) / completed)
        before_s = _cpu_s(gateway)
        times_s = await send_staggered(gateway.port, streams=plan.streams, rounds=plan.rounds)
        samples.add("event_cpu_s", (_cpu_s(gateway) - before_s) / len(times_s) / backend.EVENTS)
        samples.add("first_word_s", *times_s)
    except* (WrongAnswer, TimeoutError, OSError) as errors:
        samples.failures["answers"] = repr(errors.exceptions[0])[:300]


def _cpu_s(gateway: Running) -> float:
    return 0.0 if gateway.process_id is None else cpu_s(gateway.process_id)


def _metadata(plan: Plan) -> dict[str, str]:
    pins = sorted(pin for peer in PEERS if peer.venv for pin in peer.venv.pins)
    return {
        "measured": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": f"{platform.system()} {platform.machine()}, {cpu_count()} cores",
        "python": platform.python_version(),
        "repetitions": f"{plan.repetitions}, each up to {plan.requests} requests of a kind, "
        f"{_CONCURRENCY} at once",
        "peers": ", ".join(pins),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    add = parser.add_argument
    add("--peers", default=_PEER_NAMES, help=f"comma-separated, may be empty ({_PEER_NAMES})")
    add("--repetitions", type=int, default=FULL.repetitions)
    add("--quick", action="store_true", help="check that everything runs; write no results")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    selected = {name.strip() for name in options.peers.split(",")}
    names = [peer.name for peer in PEERS if peer.name in selected]
    plan = QUICK
    if not options.quick:
        plan = replace(FULL, repetitions=options.repetitions)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    venvs = options.venv_dir.resolve()
    venvs.mkdir(parents=True, exist_ok=True)
    samples = run(measure_all(plan, names, venvs, console))
    grids = gateway_tables.grids(samples)
    for grid in grids:
        console.print(grid.to_table())
    failures = gateway_tables.failures(samples)
    for failure in failures:
        console.print(failure)
    if not options.quick:
        facts = [f"- {name}: {value}" for name, value in _metadata(plan).items()]
        page = ["## Gateway\n", *facts, "", *(grid.to_markdown() for grid in grids)]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join([*page, *failures]).rstrip() + "\n")


if __name__ == "__main__":
    main()
