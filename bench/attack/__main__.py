"""A standing attacker: it plays attacks on real processes, and prints what held.

`python -m bench.attack --seconds 600 --seed 7` starts a gateway with Redis and keys, a worker with
the demo model and a worker that lies, and attacks them beside a neighbour, who asks small things
at a fixed pace: raw HTTP at both ports, pages of other sites, lying and late answers, lying
reports, hostile bodies and header values, slow clients, abuse of keys and budgets, costly grammars,
requests that go on from large ones, followers that read nothing, large bodies, huge prompts, and
folders that others have prepared. Then it compares the sums of all that was counted, kills each
part under load, fills a disk, damages checkpoints, and floods ports. The seed makes every random
choice; `--only NAME` plays one kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import Progress, TaskID

from bench.attack import checkpoints, sums
from bench.attack.attack import Attack, Tally, Target
from bench.attack.bodies import HostileBodies
from bench.attack.budgets import Budgets
from bench.attack.connections import Flood, run_floods
from bench.attack.connections import Target as FloodTarget
from bench.attack.formats import WireFormats
from bench.attack.front import Front
from bench.attack.full_disk import FullDisk
from bench.attack.grammars import CostlyGrammars
from bench.attack.header_values import HeaderValues
from bench.attack.kept_responses import Followers, Unfolding
from bench.attack.key_abuse import KeyAbuse, create_key
from bench.attack.kills import Kills
from bench.attack.large_bodies import HugePrompts, LargeBodies
from bench.attack.lying_workers import EarlyHeads, LyingAnswers, LyingReports
from bench.attack.neighbour import KEPT_SHARE, Neighbourhood
from bench.attack.origins import Origins
from bench.attack.planted_folders import PlantedFolders
from bench.attack.raw_http import RawHttp
from bench.attack.slow import SlowClients
from bench.attack.stack import (
    JEMALLOC,
    fixed_port,
    running_parts,
    running_target,
    wait_until_up,
    worker_part,
)
from bench.gateway.contenders import OURS, gateway_parser, running, running_backend
from bench.harness import tables
from gateway.event_loop import run

RESULTS: Final = Path(__file__).parents[1] / "results" / "attack.md"
AT_TARGET: Final[tuple[Attack, ...]] = (
    *(RawHttp(), Origins(), LyingAnswers(), EarlyHeads(), LyingReports(), HostileBodies()),
    *(WireFormats(), SlowClients(), KeyAbuse(), Budgets(), HeaderValues(), PlantedFolders()),
    *(CostlyGrammars(), Unfolding(), Followers(), LargeBodies(), HugePrompts()),
)
OF_THEIR_OWN: Final[tuple[Attack, ...]] = (Kills(), FullDisk(), Front())
"""Attacks that start processes of their own, because they kill them or fill their disk."""
FLOODS: Final = "floods"
_NAMES: Final = (
    *(attack.name for attack in (*AT_TARGET, *OF_THEIR_OWN)),
    *(checkpoints.NAME, FLOODS),
)
_GROWTH_MB: Final = 20.0
_ALONE_S: Final = 10.0
_JUDGED_S: Final = 10.0
"""A shorter run, which tests do on busy machines, says nothing of time."""
_AFTER_S: Final = 60.0
_NICENESS: Final = 10
"""Of the attacker: a real one takes no processor time of the machine that it attacks."""
_INPUTS: Final = 100_000
_WHOLE_S: Final = 600.0
_ATTACKED_SHARE: Final = 0.75
"""Of the time of a whole run; floods, and memory that returns, take the rest."""
_FLOOD_GROWTH_MB: Final = 10.0
_CONNECTION_KB: Final = 20.0
_NEIGHBOUR_MS: Final = 50.0


class Memory(NamedTuple):
    """Resident memory of an attacked process, in MB."""

    part: str
    start: float
    half: float
    end: float
    """A minute after the last attack."""


class Result(NamedTuple):
    """The tallies of all attacks, and what they did to the attacked processes."""

    tallies: tuple[tuple[Tally, str], ...]
    """Each with the promise that it tests."""
    memory: tuple[Memory, ...]
    neighbourhood: Neighbourhood

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


async def attack(seconds: float, after_s: float, only: Sequence[str], player: Player) -> Result:
    """Play the chosen attacks for some time in total, those at the target beside a neighbour.

    Each is played in both halves. In the first a process gets the memory of its largest work; after
    its turn in the second its memory must return, for which it has a minute (less in a short run).
    """
    at_target = [attack for attack in AT_TARGET if attack.name in only]
    of_their_own = [attack for attack in OF_THEIR_OWN if attack.name in only]
    shares = sum(attack.share for attack in (*at_target, *of_their_own))
    checked = Tally(sums.NAME)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-attack-"))
        target, parts = await stack.enter_async_context(running_target(Path(folder)))
        watch = Neighbourhood({name: part.pid for name, part in parts.items()}, after_s=after_s)
        key = (await create_key(target, "neighbour"))["secret"]
        async with watch.running(target.gateway_port, key, alone_s=min(_ALONE_S, seconds)):
            os.nice(_NICENESS)
            memory = [await watch.resident_mb()]
            for half in ("/first", "/second"):
                for kind in at_target:
                    async with watch.beside(kind.name, settle=half == "/second"):
                        share = seconds / 2 * kind.share / shares
                        await player.play(kind, target, share, half)
                memory.append(await watch.resident_mb())
            await asyncio.sleep(after_s)
            memory[-1] = await watch.resident_mb()
        if seconds >= _JUDGED_S:
            watch.judge(player.tallies.values())
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
    grown = [Memory(name, *(one[name] for one in memory)) for name in parts]
    return Result((*tallies, (checked, sums.PROMISE)), tuple(grown), watch)


async def flood(home: Path, *, scale: float, after_s: float) -> list[Flood]:
    """Flood a gateway of its own, which has a worker, and a worker alone."""
    async with (
        running_backend() as worker_port,
        running(OURS, venvs=home, worker_port=worker_port) as gateway,
    ):
        assert gateway.process_id is not None
        target = FloodTarget("gateway", gateway.port, gateway.process_id)
        floods = await run_floods(target, scale=scale, after_s=after_s)
    port = fixed_port()
    with tempfile.TemporaryDirectory(prefix="paceline-attack-") as folder:
        worker = worker_part(Path(folder), port)
        async with running_parts(worker):
            await wait_until_up(port)
            target = FloodTarget("worker", port, worker.pid)
            floods += await run_floods(target, scale=scale, after_s=after_s)
    return floods


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
        columns=("process", "at the start", "after half of the time", "a minute after the end"),
        rows=tuple(
            (one.part, *(f"{value:.1f}" for value in (one.start, one.half, one.end)))
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
            name=f"growth of the {one.part} in {name}, MB",
            reached=one.end - before,
            bound=_GROWTH_MB,
            at_least=False,
        )
        for one in result.memory
        for name, before in (("the whole run", one.start), ("the second half", one.half))
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
            *(
                "at",
                "sent",
                "count",
                "MB before",
                "MB at the peak",
                "MB after",
                "looked at after, s",
            ),
            *("neighbour p99, ms", "closed"),
        ),
        rows=tuple(
            (
                flood.part,
                flood.name,
                f"{flood.sent:,}",
                *(f"{value:.1f}" for value in flood.memory),
                f"{flood.after_s:.0f}",
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
            "growth to the peak, MB": (
                flood.memory.peak - flood.memory.before,
                of_connections or _FLOOD_GROWTH_MB,
            ),
            "memory 60 s after, to that before": (
                flood.memory.after / flood.memory.before,
                KEPT_SHARE,
            ),
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
    parser.add_argument("--seconds", type=float, help="time of all but damaged checkpoints")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", action="append", choices=_NAMES, help="repeatable")
    parser.add_argument("--checkpoints", type=int, help="number of damaged checkpoints")
    options = parser.parse_args(arguments)
    quick: bool = options.quick
    seconds = options.seconds or (6.0 if quick else 600.0)
    whole = not quick and not options.only and seconds >= _WHOLE_S
    count = options.checkpoints if options.checkpoints is not None else (2 if quick else 2000)
    only: tuple[str, ...] = tuple(options.only or _NAMES)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    grids: list[tables.Grid] = []
    targets: list[tables.Target] = []
    result = Result((), (), Neighbourhood({}, after_s=0.0))
    after_s = min(_AFTER_S, seconds)
    with Progress(console=console) as progress:
        if set(only) - {checkpoints.NAME, FLOODS}:
            attacked_s = seconds * (_ATTACKED_SHARE if whole else 1.0)
            result = run(attack(attacked_s, after_s, only, Player(options.seed, progress)))
        if checkpoints.NAME in only and count and sys.platform == "linux":
            tally = Tally(checkpoints.NAME)
            bar = progress.add_task(checkpoints.NAME, total=count)
            checkpoints.load_checkpoints(count, options.seed, tally, lambda: progress.advance(bar))
            result = result._replace(tallies=(*result.tallies, (tally, checkpoints.PROMISE)))
        grids += [attack_table(result), result.neighbourhood.table(), memory_table(result)]
        targets += attack_targets(result, whole=whole)
        targets += result.neighbourhood.targets()
        if FLOODS in only:
            progress.add_task(FLOODS, total=None)
            scale = 0.02 if quick else 1.0
            floods = run(flood(options.log_dir, scale=scale, after_s=after_s))
            grids.append(flood_table(floods))
            targets += flood_targets(floods)
    grids.append(tables.targets(targets))
    for grid in grids:
        console.print(grid.to_table())
    for failed, _ in result.tallies:
        for failure in failed.failures:
            console.print(f"--seed {options.seed} --only {failed.name!r}: {failure}", markup=False)
    if not quick and not options.only:
        counted = "" if options.checkpoints is None else f" --checkpoints {count}"
        command = f"`python -m bench.attack --seconds {seconds:g} --seed {options.seed}{counted}`"
        tables.write_page(RESULTS, "Attacks", f"{tables.provenance()}. {command}", *grids)
    if result.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
