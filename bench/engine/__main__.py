"""Our worker compared with other engines, on one checkpoint, in one run.

`python -m bench.engine` makes a virtual environment for each peer, then starts, measures and stops
one server after another, so that each server has the machine to itself. Every repetition measures
them in another order, so that a warm or busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from os import cpu_count
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from tokenizers import Tokenizer

from bench.engine import tables
from bench.engine.bare import Bare, measure_bare
from bench.engine.session import FULL, QUICK, Plan, measure
from bench.engine.targets import judge
from bench.harness.blas import preload
from bench.harness.contenders import OURS, PEERS, Contender
from bench.harness.samples import Samples
from bench.harness.servers import running
from bench.harness.tables import Grid, Target
from bench.harness.tables import targets as targets_grid
from bench.harness.venvs import PeerUnavailable, python_of
from workers.demo import CHECKPOINT

RESULTS: Final = Path(__file__).parents[1] / "results"
_PEER_NAMES: Final = ",".join(peer.name for peer in PEERS)


@dataclass
class Run:
    """The samples and the settings of one run."""

    model: Path
    venvs: Path
    plan: Plan
    samples: dict[str, Samples]
    bare: Bare = field(default_factory=Bare)


async def measure_all(run: Run, console: Console, repetitions: int) -> None:
    """Measure all contenders repeatedly, each time in another order."""
    contenders = [OURS, *(peer for peer in PEERS if peer.name in run.samples)]
    interpreters = {
        contender.name: _interpreter(run, contender, console) for contender in contenders
    }
    count_tokens = _token_counter(run.model)
    for repetition in range(repetitions):
        first = repetition % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            python = interpreters[contender.name]
            if python is not None:
                console.print(f"{repetition + 1}/{repetitions} {contender.name}")
                await _measure_contender(run, contender, python, repetition, count_tokens)
            if (
                contender is OURS
            ):  # immediately: bare rounds are the ceiling of the last measurement
                console.print(f"{repetition + 1}/{repetitions} bare rounds")
                bare = await measure_bare(run.model)
                run.bare.rounds.extend(bare.rounds)
                run.bare.rollbacks.extend(bare.rollbacks)


def _interpreter(run: Run, contender: Contender, console: Console) -> Path | None:
    if contender.venv is None:
        return Path(sys.executable)
    console.print(f"installing {contender.name} if it is missing")
    try:
        return python_of(contender.venv, run.venvs)
    except PeerUnavailable as reason:
        run.samples[contender.name].failures["install"] = str(reason)
        return None


async def _measure_contender(
    run: Run,
    contender: Contender,
    python: Path,
    repetition: int,
    count_tokens: Callable[[str], int],
) -> None:
    samples = run.samples[contender.name]
    log = run.venvs / f"{contender.name}.log"
    try:
        async with running(contender, python=python, model=run.model, log=log) as server:
            await measure(
                server,
                samples,
                run.plan,
                ours=contender is OURS,
                seed=repetition + 1,
                count_tokens=count_tokens,
            )
    except PeerUnavailable as reason:
        samples.failures["start"] = str(reason)


def _token_counter(model: Path) -> Callable[[str], int]:
    """Return a function that counts the tokens of all engines by one rule."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _metadata(repetitions: int) -> dict[str, Any]:
    return {
        "measured": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": f"{platform.system()} {platform.machine()}, {cpu_count()} cores",
        "python": platform.python_version(),
        "blas": preload().get("LD_PRELOAD", "of the platform"),
        "repetitions": repetitions,
        "peers": sorted({pin for peer in PEERS if peer.venv for pin in peer.venv.pins}),
    }


def _write_results(
    run: Run, about: dict[str, Any], results: list[Target], grids: list[Grid]
) -> None:
    RESULTS.mkdir(exist_ok=True)
    record = {
        **about,
        "figures": {name: asdict(samples) for name, samples in run.samples.items()},
        **asdict(run.bare),
        "targets": [asdict(target) | {"met": target.met} for target in results],
    }
    (RESULTS / "engine.json").write_text(json.dumps(record, indent=1) + "\n")
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    failures = "\n".join(f"- {failure}" for failure in tables.failures(run.samples))
    page = ["## Engine\n", facts, "", *(grid.to_markdown() for grid in grids), failures]
    (RESULTS / "engine.md").write_text("\n".join(page).rstrip() + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=CHECKPOINT, help="checkpoint folder that all serve")
    add("--peers", default=_PEER_NAMES, help=f"comma-separated, may be empty ({_PEER_NAMES})")
    add("--repetitions", type=int, default=3)
    add("--quick", action="store_true", help="check that everything runs; write no results")
    add("--venv-dir", type=Path, default=Path.home() / ".cache" / "paceline-bench")
    options = parser.parse_args(arguments)
    selected = {name.strip() for name in options.peers.split(",")}
    names = [OURS.name, *(peer.name for peer in PEERS if peer.name in selected)]
    repetitions = 1 if options.quick else options.repetitions
    run = Run(
        model=options.model.resolve(),
        venvs=options.venv_dir.resolve(),
        plan=QUICK if options.quick else FULL,
        samples={name: Samples() for name in names},
    )
    run.venvs.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop the servers then, too
    try:
        asyncio.run(measure_all(run, console, repetitions))
    except KeyboardInterrupt:
        console.print("Interrupted: these are the results so far.")
    results = judge(run.samples, run.bare)
    grids = [
        tables.engines(run.samples),
        tables.draft_lengths(run.samples[OURS.name], run.bare.rounds),
        targets_grid(results),
    ]
    for grid in grids:
        console.print(grid.to_table())
    for failure in tables.failures(run.samples):
        console.print(failure)
    if not options.quick and run.bare.rounds:
        _write_results(run, _metadata(repetitions), results, grids)


if __name__ == "__main__":
    main()
