"""What the gateway itself costs, beside nginx, two routers in Rust and LiteLLM, in one run.

`python -m bench.gateway` makes a virtual environment for each peer and starts them all before one
worker that answers faster than any of them relays. Each repetition asks all in another order. Our
gateway runs with a key and all that is on by default (policy, accounting, metrics); its peers run
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
from bench.gateway.load import Question, WrongAnswer, ask_many, ask_staggered
from bench.harness.process_cost import cpu_s
from bench.harness.samples import Samples
from bench.harness.venvs import PeerUnavailable
from gateway.server import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "gateway.md"
_PEER_NAMES: Final = ",".join(peer.name for peer in PEERS)
_AT_ONCE: Final = 16
_WHOLE: Final = Question(stream=False)
_STREAM: Final = Question(stream=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is asked."""

    repetitions: int
    requests: int
    streams: int
    """At once, paced and staggered."""
    rounds: int
    """How often each of those is repeated."""
    budget_s: float
    """No figure of one gateway takes longer than this in a repetition."""


FULL: Final = Plan(repetitions=5, requests=3000, streams=50, rounds=5, budget_s=20)
QUICK: Final = Plan(repetitions=1, requests=60, streams=50, rounds=1, budget_s=3)


async def measure_all(
    plan: Plan, names: Sequence[str], venvs: Path, console: Console
) -> dict[str, Samples]:
    """Measure the worker alone, our gateway and the peers of these names."""
    samples = {name: Samples() for name in (gateway_tables.DIRECT, OURS.name, *names)}
    async with AsyncExitStack() as stack:
        worker_port = await stack.enter_async_context(running_backend())
        lines = [Running(name=gateway_tables.DIRECT, port=worker_port, process_id=None)]
        for contender in (OURS, *(peer for peer in PEERS if peer.name in names)):
            console.print(f"starting {contender.name}, installing it where it is missing")
            try:
                started = running(contender, venvs=venvs, worker_port=worker_port)
                lines.append(await stack.enter_async_context(started))
            except PeerUnavailable as reason:
                samples[contender.name].failures["start"] = str(reason)
        for repetition in range(plan.repetitions):
            first = repetition % len(lines)
            for line in (*lines[first:], *lines[:first]):
                console.print(f"{repetition + 1}/{plan.repetitions} {line.name}")
                await _measure(line, plan, samples[line.name])
    return samples


async def _measure(line: Running, plan: Plan, samples: Samples) -> None:
    try:
        for name, question in (("whole", _WHOLE), ("stream", _STREAM)):
            await ask_many(
                line.port, question, requests=plan.requests // 10, at_once=_AT_ONCE, budget_s=5
            )
            before_s = _cpu_s(line)
            asked = await ask_many(
                line.port,
                question,
                requests=plan.requests,
                at_once=_AT_ONCE,
                budget_s=plan.budget_s,
            )
            samples.add(f"{name}_cpu_s", (_cpu_s(line) - before_s) / asked)
        before_s = _cpu_s(line)
        found = await ask_staggered(line.port, streams=plan.streams, rounds=plan.rounds)
        samples.add("event_cpu_s", (_cpu_s(line) - before_s) / len(found) / backend.EVENTS)
        samples.add("first_word_s", *found)
    except* (WrongAnswer, TimeoutError, OSError) as wrong:
        samples.failures["answers"] = repr(wrong.exceptions[0])[:300]


def _cpu_s(line: Running) -> float:
    return 0.0 if line.process_id is None else cpu_s(line.process_id)


def _about(plan: Plan) -> dict[str, str]:
    pins = sorted(pin for peer in PEERS if peer.venv for pin in peer.venv.pins)
    return {
        "measured": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": f"{platform.system()} {platform.machine()}, {cpu_count()} cores",
        "python": platform.python_version(),
        "repetitions": f"{plan.repetitions}, each up to {plan.requests} requests of a kind, "
        f"{_AT_ONCE} at once",
        "peers": ", ".join(pins),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    add = parser.add_argument
    add("--peers", default=_PEER_NAMES, help=f"comma-separated, may be empty ({_PEER_NAMES})")
    add("--repetitions", type=int, default=FULL.repetitions)
    add("--quick", action="store_true", help="see that all of it runs; writes no results")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    wanted = {name.strip() for name in options.peers.split(",")}
    names = [peer.name for peer in PEERS if peer.name in wanted]
    plan = QUICK
    if not options.quick:
        plan = replace(FULL, repetitions=options.repetitions)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    venvs = options.venv_dir.resolve()
    venvs.mkdir(parents=True, exist_ok=True)
    samples = run(measure_all(plan, names, venvs, console))
    grids = gateway_tables.grids(samples)
    for grid in grids:
        console.print(grid.drawn())
    missing = gateway_tables.failures(samples)
    for line in missing:
        console.print(line)
    if not options.quick:
        facts = [f"- {name}: {value}" for name, value in _about(plan).items()]
        page = ["## Gateway\n", *facts, "", *(grid.markdown() for grid in grids)]
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text("\n".join([*page, *missing]).rstrip() + "\n")


if __name__ == "__main__":
    main()
