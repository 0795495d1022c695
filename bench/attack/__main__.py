"""A standing attacker: it plays attacks on real processes, and prints what held.

`python -m bench.attack --seconds 600 --seed 7` starts a gateway with Redis and keys, a worker with
the demo model and a worker that lies, and attacks them: raw HTTP at both ports, pages of other
sites, lying and late answers, lying reports, hostile bodies, slow clients, abuse of keys, kill -9
of each part under load, a full disk, damaged checkpoints, floods, and large bodies. Then it
compares the sums of all that was counted. The seed makes every random choice; `--only NAME` plays
one kind.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import Progress, TaskID

from bench.attack import checkpoints, large_bodies, sums
from bench.attack.attack import Attack, Tally, Target
from bench.attack.bodies import HostileBodies
from bench.attack.connections import Flood, run_floods
from bench.attack.connections import Target as FloodTarget
from bench.attack.formats import WireFormats
from bench.attack.front import Front
from bench.attack.full_disk import FullDisk
from bench.attack.key_abuse import KeyAbuse
from bench.attack.kills import Kills
from bench.attack.lying_workers import EarlyHeads, LyingAnswers, LyingReports
from bench.attack.origins import Origins
from bench.attack.raw_http import RawHttp
from bench.attack.slow import SlowClients
from bench.attack.stack import (
    JEMALLOC,
    Part,
    fixed_port,
    running_parts,
    running_target,
    wait_until_up,
    worker_part,
)
from bench.gateway.contenders import OURS, gateway_parser, running, running_backend
from bench.harness import tables
from bench.harness.process_cost import resident_bytes
from gateway.event_loop import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "attack.md"
AT_TARGET: Final[tuple[Attack, ...]] = (
    *(RawHttp(), Origins(), LyingAnswers(), EarlyHeads(), LyingReports(), HostileBodies()),
    *(WireFormats(), SlowClients(), KeyAbuse()),
)
OF_THEIR_OWN: Final[tuple[Attack, ...]] = (Kills(), FullDisk(), Front())
"""Attacks that start processes of their own, because they kill them or fill their disk."""
FLOODS: Final = "floods"
_NAMES: Final = (
    *(attack.name for attack in (*AT_TARGET, *OF_THEIR_OWN)),
    *(checkpoints.NAME, FLOODS, large_bodies.NAME),
)
_GROWTH_MB: Final = 20.0
"""In the second half of the time: in the first a process gets the memory of its largest work."""
_INPUTS: Final = 100_000
_INPUTS_AFTER_S: Final = 600.0
_FLOOD_GROWTH_MB: Final = 10.0
_CONNECTION_KB: Final = 20.0
_NEIGHBOUR_MS: Final = 50.0
_AGAIN_MB: Final = 2.0
"""Of the same flood again: what the first one took is free, though the process may keep it."""


class Memory(NamedTuple):
    """Resident memory of an attacked process."""

    part: str
    start_mb: float
    half_mb: float
    end_mb: float

    @property
    def growth_mb(self) -> float:
        """Return the growth in the second half."""
        return self.end_mb - self.half_mb


class Result(NamedTuple):
    """The tallies of all attacks, and the memory of the attacked processes."""

    tallies: tuple[tuple[Tally, str], ...]
    """Each with the promise that it tests."""
    memory: tuple[Memory, ...]

    @property
    def failed(self) -> int:
        """Promises that did not hold."""
        return sum(tally.failed for tally, _ in self.tallies)


class Player:
    """Plays attacks one after another, each with a random generator of its own."""

    def __init__(self, seed: int, progress: Progress) -> None:
        self._seed = seed
        self._progress = progress
        self.tallies: dict[str, Tally] = {}

    async def play(self, attack: Attack, target: Target, seconds: float, turn: str = "") -> None:
        """Play one attack for some time."""
        tally = self.tallies.setdefault(attack.name, Tally(attack.name))
        began_s = time.monotonic()
        bar = self._progress.add_task(attack.name, total=seconds)
        watching = asyncio.create_task(self._watch(bar, tally, began_s))
        rng = Random(f"{self._seed}/{attack.name}{turn}")
        try:
            await attack.run(target, rng, began_s + seconds, tally)
        finally:
            watching.cancel()
            self._progress.update(bar, completed=seconds)

    async def _watch(self, bar: TaskID, tally: Tally, began_s: float) -> None:
        while True:
            name = f"{tally.name}: {tally.inputs:,} inputs, {tally.failed} failed"
            elapsed_s = time.monotonic() - began_s
            self._progress.update(bar, completed=elapsed_s, description=name)
            await asyncio.sleep(0.5)


async def attack(
    seconds: float, seed: int, only: Sequence[str], progress: Progress, home: Path
) -> Result:
    """Play the chosen attacks for some time in total."""
    player = Player(seed, progress)
    at_target = [attack for attack in AT_TARGET if attack.name in only]
    of_their_own = [attack for attack in OF_THEIR_OWN if attack.name in only]
    shares = sum(attack.share for attack in (*at_target, *of_their_own))
    checked = Tally(sums.NAME)
    async with running_target(home) as (target, parts):
        resident_mb = [_resident_mb(parts)]
        for half in ("/first", "/second"):
            for kind in at_target:
                await player.play(kind, target, seconds / 2 * kind.share / shares, half)
            resident_mb.append(_resident_mb(parts))
        await sums.check_sums(target, checked)
        for part in parts.values():
            if not part.alive:
                checked.fail(f"the {part.name} has ended", part.log.read_text()[-500:])
            if part.tracebacks():
                checked.fail(f"tracebacks of the {part.name}", part.log.read_text()[-1000:])
        for kind in of_their_own:
            await player.play(kind, target, seconds * kind.share / shares)
    promises = {kind.name: kind.promise for kind in (*at_target, *of_their_own)}
    tallies = [(player.tallies[name], promise) for name, promise in promises.items()]
    memory = [Memory(name, *(one[name] for one in resident_mb)) for name in parts]
    return Result((*tallies, (checked, sums.PROMISE)), tuple(memory))


def _resident_mb(parts: Mapping[str, Part]) -> dict[str, float]:
    return {name: resident_bytes(part.pid) / 1e6 for name, part in parts.items()}


async def flood(home: Path, *, scale: float) -> list[Flood]:
    """Flood a gateway of its own, which has a worker, and a worker alone."""
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as gateway,
    ):
        assert gateway.process_id is not None
        target = FloodTarget("gateway", gateway.port, gateway.process_id)
        floods = await run_floods(target, scale=scale)
    port = fixed_port()
    with tempfile.TemporaryDirectory(prefix="paceline-attack-") as folder:
        worker = worker_part(Path(folder), port)
        async with running_parts(worker):
            await wait_until_up(port)
            floods += await run_floods(FloodTarget("worker", port, worker.pid), scale=scale)
    return floods


async def send_large_bodies(home: Path, *, quick: bool) -> list[large_bodies.Wait]:
    """Send large bodies to a gateway of its own, beside a neighbour."""
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as gateway,
    ):
        return await large_bodies.measure(gateway.port, quick=quick)


def attack_table(result: Result) -> tables.Grid:
    """Return inputs, answers and what held, for each attack."""
    rows = [
        (
            tally.name,
            f"{tally.inputs:,}",
            ", ".join(f"{name} {count:,}" for name, count in tally.answers.most_common()),
            str(tally.ours),
            "; ".join((promise, *tally.notes)),
            "yes" if not tally.failed else f"NO, {tally.failed:,} times",
        )
        for tally, promise in result.tallies
    ]
    return tables.Grid(
        title="Attacks on a gateway, its workers and its Redis",
        columns=("attack", "inputs", "answers", "our 5xx", "promise", "held"),
        rows=tuple(rows),
    )


def memory_table(result: Result) -> tables.Grid:
    """Return the memory of the attacked processes."""
    allocator = ", worker with jemalloc" if JEMALLOC else ""
    return tables.Grid(
        title=f"Resident memory of the attacked processes, MB{allocator}",
        columns=("process", "at the start", "after half of the time", "at the end"),
        rows=tuple(
            (one.part, *(f"{value:.1f}" for value in (one.start_mb, one.half_mb, one.end_mb)))
            for one in result.memory
        ),
    )


def attack_targets(result: Result, *, whole: bool) -> list[tables.Target]:
    """Return the targets of the attacks."""
    at_most = {
        "5xx that are ours": float(sum(tally.ours for tally, _ in result.tallies)),
        "promises that did not hold": float(result.failed),
    }
    bounds = [
        tables.Target(name=name, reached=reached, bound=0.0, at_least=False)
        for name, reached in at_most.items()
    ]
    bounds += [
        tables.Target(
            name=f"growth of the {one.part} in the second half, MB",
            reached=one.growth_mb,
            bound=_GROWTH_MB,
            at_least=False,
        )
        for one in result.memory
    ]
    if whole:
        inputs = sum(tally.inputs for tally, _ in result.tallies)
        bounds.append(
            tables.Target(name="inputs", reached=float(inputs), bound=_INPUTS, at_least=True)
        )
    return bounds


def flood_table(floods: Sequence[Flood]) -> tables.Grid:
    """Return the effect of every flood."""
    return tables.Grid(
        title="Floods at the port of a gateway, and at that of a worker",
        columns=(
            *("at", "sent", "count", "memory, MB", "kept, MB", "memory of a repetition, MB"),
            *("neighbour p99, ms", "closed"),
        ),
        rows=tuple(
            (
                flood.part,
                flood.name,
                f"{flood.sent:,}",
                f"{flood.grown_mb:+.1f}",
                f"{flood.kept_mb:+.1f}",
                f"{flood.again_mb:+.1f}",
                f"{flood.neighbour_p99_ms:.1f}",
                "yes" if flood.closed else "NO",
            )
            for flood in floods
        ),
    )


def flood_targets(floods: Sequence[Flood]) -> list[tables.Target]:
    """Return the bounds of every flood: memory, its return, and the wait of a neighbour."""
    bounds = []
    for flood in floods:
        of_connections = flood.sent * _CONNECTION_KB / 1000 if "bodies" in flood.name else 0.0
        at_most = {
            "memory, MB": (flood.grown_mb, of_connections or _FLOOD_GROWTH_MB),
            "memory of a repetition, MB": (flood.again_mb, _AGAIN_MB),
            "neighbour p99, ms": (flood.neighbour_p99_ms, _NEIGHBOUR_MS),
            "connections not closed in time": (float(not flood.closed), 0.0),
        }
        bounds += [
            tables.Target(
                name=f"{flood.part}, {flood.name}: {name}",
                reached=reached,
                bound=bound,
                at_least=False,
            )
            for name, (reached, bound) in at_most.items()
        ]
    return bounds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = gateway_parser("bench.attack", __doc__)
    parser.add_argument("--seconds", type=float, help="time of all attacks that have no end")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", action="append", choices=_NAMES, help="repeatable")
    parser.add_argument("--checkpoints", type=int, help="number of damaged checkpoints")
    options = parser.parse_args(arguments)
    quick: bool = options.quick
    seconds = options.seconds or (6.0 if quick else 600.0)
    count = options.checkpoints if options.checkpoints is not None else (2 if quick else 2000)
    only: tuple[str, ...] = tuple(options.only or _NAMES)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    grids: list[tables.Grid] = []
    targets: list[tables.Target] = []
    result = Result((), ())
    with Progress(console=console) as progress:
        if set(only) - {checkpoints.NAME, FLOODS, large_bodies.NAME}:
            with tempfile.TemporaryDirectory(prefix="paceline-attack-") as home:
                result = run(attack(seconds, options.seed, only, progress, Path(home)))
        if checkpoints.NAME in only and count and sys.platform == "linux":
            tally = Tally(checkpoints.NAME)
            bar = progress.add_task(checkpoints.NAME, total=count)
            checkpoints.load_checkpoints(count, options.seed, tally, lambda: progress.advance(bar))
            result = Result((*result.tallies, (tally, checkpoints.PROMISE)), result.memory)
        grids += [attack_table(result), memory_table(result)]
        targets += attack_targets(result, whole=not options.only and seconds >= _INPUTS_AFTER_S)
        if FLOODS in only:
            progress.add_task(FLOODS, total=None)
            floods = run(flood(options.log_dir, scale=0.02 if quick else 1.0))
            grids.append(flood_table(floods))
            targets += flood_targets(floods)
        if large_bodies.NAME in only:
            progress.add_task(large_bodies.NAME, total=None)
            waits = run(send_large_bodies(options.log_dir, quick=quick))
            grids.append(large_bodies.table(waits))
            targets += large_bodies.targets(waits)
    grids.append(tables.targets(targets))
    for grid in grids:
        console.print(grid.to_table())
    for failed, _ in result.tallies:
        for failure in failed.failures:
            console.print(f"--seed {options.seed} --only {failed.name!r}: {failure}", markup=False)
    if not quick and not options.only:
        command = f"`python -m bench.attack --seconds {seconds:g} --seed {options.seed}`"
        tables.write_page(RESULTS, "Attacks", f"{tables.provenance()}. {command}", *grids)
    if result.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
