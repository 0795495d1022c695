"""A standing attacker: it plays attacks on real processes, and prints what held.

`python -m bench.attack --seconds 600 --seed 7` starts a gateway with Redis and keys, a worker with
the demo model and a worker that lies, and attacks them beside two neighbours, who ask small things
at a fixed pace: raw HTTP at both ports, floods of single connections, pages of other sites, lying
and late answers, lying reports, hostile bodies and header values, slow clients, abuse of budgets,
costly grammars, large bodies and huge prompts. Then it compares the sums of all that was counted,
kills each part under load, and fills a disk. The seed makes every random choice; `--only NAME`
plays one kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from rich.progress import Progress, TaskID

from bench.attack import sums
from bench.attack.attack import Attack, Tally
from bench.attack.attack import Target as Attacked
from bench.attack.bodies import CostlyGrammars, HostileBodies, WireFormats
from bench.attack.budgets import Budgets
from bench.attack.floods import Floods
from bench.attack.full_disk import FullDisk
from bench.attack.header_values import HeaderValues
from bench.attack.kills import Kills
from bench.attack.large_bodies import HugePrompts, LargeBodies
from bench.attack.lying_workers import EarlyHeads, LyingAnswers, LyingReports
from bench.attack.neighbour import MODEL, Neighbourhood
from bench.attack.origins import Origins
from bench.attack.raw_http import RawHttp
from bench.attack.slow import SlowClients
from bench.attack.stack import JEMALLOC, running_target
from bench.harness.options import parser
from bench.harness.processes import CORES, keep_to
from bench.harness.tables import Grid, Target, console, provenance, report, show, targets
from gateway.event_loop import run

_AT_TARGET: Final[tuple[type[Attack], ...]] = (
    *(RawHttp, Floods, Origins, LyingAnswers, EarlyHeads, LyingReports, HostileBodies, WireFormats),
    *(SlowClients, Budgets, HeaderValues, CostlyGrammars, LargeBodies, HugePrompts),
)
_OF_THEIR_OWN: Final[tuple[type[Attack], ...]] = (Kills, FullDisk)
"""Attacks that start processes of their own, because they kill them or fill their disk."""
_NAMES: Final = tuple(kind.name for kind in (*_AT_TARGET, *_OF_THEIR_OWN))
_GROWTH_MB: Final = 20.0
_ALONE_S: Final = 10.0
_JUDGED_S: Final = 10.0
"""A shorter run, which tests do on busy machines, says nothing of time."""
_AFTER_S: Final = 60.0
_NICENESS: Final = 10
"""Of an attacker that is judged: a real one takes no processor time of what it attacks."""
_FIRST_USE: Final = (
    "The first work of each kind takes memory that stays: buffers of MLX, and the process that "
    "tries constraints. The growth of the second half, and of each attack, shows what is lost."
)
_INPUTS: Final = 100_000
_WHOLE_S: Final = 600.0
_ATTACKED_SHARE: Final = 0.75
"""Of the time of a whole run; memory that returns takes the rest."""


class Result(NamedTuple):
    """The tallies of all attacks, and what they did to the attacked processes."""

    tallies: list[Tally]
    memory: dict[str, tuple[float, float, float]]
    """MB of each process: at the start, after half of the time, a minute after the end."""
    neighbourhood: Neighbourhood
    sharing: Neighbourhood
    """The neighbour at the engine of the attacked worker."""

    def grids(self) -> Iterator[Grid]:
        yield self._attacks()
        yield self.neighbourhood.table()
        yield self.sharing.table()
        allocator = ", worker with jemalloc" if JEMALLOC else ""
        columns = ("process", "at the start", "after half of the time", "a minute after the end")
        rows = [(part, *(f"{mb:.1f}" for mb in memory)) for part, memory in self.memory.items()]
        yield Grid(f"Resident memory of the attacked processes, MB{allocator}", columns, rows)

    def _attacks(self) -> Grid:
        rows = []
        for one in self.tallies:
            answers = ", ".join(f"{name} {n:,}" for name, n in one.answers.most_common())
            promise = "; ".join((one.promise, *one.notes))
            held = f"NO, {one.failed:,} times" if one.failed else "yes"
            rows.append((one.name, f"{one.inputs:,}", answers, one.ours, promise, held))
        columns = ("attack", "inputs", "answers", "our 5xx", "promise", "held")
        return Grid("Attacks on a gateway, its workers and its Redis", columns, rows)

    def targets(self, *, whole: bool) -> Iterator[Target]:
        yield Target("5xx that are ours", float(sum(one.ours for one in self.tallies)), 0.0)
        failed = float(sum(one.failed for one in self.tallies))
        yield Target("promises that did not hold", failed, 0.0)
        for part, (start, half, end) in self.memory.items():
            for name, before in (("the whole run", start), ("the second half", half)):
                yield Target(f"growth of the {part} in {name}, MB", end - before, _GROWTH_MB)
        if whole:
            inputs = float(sum(one.inputs for one in self.tallies))
            yield Target("inputs", inputs, _INPUTS, at_least=True)
        yield from self.neighbourhood.targets()


class Player:
    """Plays attacks one after another, each with a random generator of its own."""

    def __init__(self, seed: int, progress: Progress) -> None:
        self._seed = seed
        self._progress = progress
        self.tallies: dict[str, Tally] = {}

    async def play(
        self, kind: type[Attack], target: Attacked, seconds: float, turn: str = ""
    ) -> None:
        tally = self.tallies.setdefault(kind.name, Tally(kind.name, kind.promise))
        began_s = time.monotonic()
        bar = self._progress.add_task(kind.name, total=seconds)
        watching = asyncio.create_task(self._watch(bar, tally, began_s))
        rng = Random(f"{self._seed}/{kind.name}{turn}")
        try:
            await kind(target, tally, rng, began_s + seconds).run()
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
    """Play the chosen attacks for some time in total, those at the target beside neighbours.

    Each is played in both halves. In the first a process gets the memory of its largest work; after
    its turn in the second its memory must return, for which it has a minute (less in a short run).
    """
    at_target = [kind for kind in _AT_TARGET if kind.name in only]
    of_their_own = [kind for kind in _OF_THEIR_OWN if kind.name in only]
    shares = sum(kind.share for kind in (*at_target, *of_their_own))
    checked = Tally(sums.NAME, sums.PROMISE)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-attack-"))
        target, parts = await stack.enter_async_context(running_target(Path(folder)))
        watch = Neighbourhood({name: part.pid for name, part in parts.items()}, after_s=after_s)
        sharing = Neighbourhood({}, model=MODEL)
        prepared, own = [await target.create_key("neighbour") for _ in range(2)]
        target.prepared_key = prepared["id"]
        port, alone_s = target.gateway_port, min(_ALONE_S, seconds)
        async with (
            sharing.running(port, own["secret"], alone_s),
            watch.running(port, prepared["secret"], alone_s),
        ):
            if seconds >= _JUDGED_S:
                os.nice(_NICENESS)
            memory = [await watch.resident_mb()]
            for half in ("/first", "/second"):
                for kind in at_target:
                    async with (
                        watch.beside(kind.name, settle=half == "/second"),
                        sharing.beside(kind.name, settle=False),
                    ):
                        share_s = seconds / 2 * kind.share / shares
                        await player.play(kind, target, share_s, half)
                memory.append(await watch.resident_mb())
            await asyncio.sleep(after_s)
            memory[-1] = await watch.resident_mb()
        if seconds >= _JUDGED_S:
            watch.judge(player.tallies.values())
            sharing.judge(player.tallies.values())
        await sums.check_sums(target, checked)
        for part in parts.values():
            if not part.alive:
                checked.fail(f"the {part.name} has ended", part.log.read_text()[-500:])
            if part.tracebacks():
                checked.fail(f"tracebacks of the {part.name}", part.log.read_text()[-1000:])
        keep_to(CORES)
        for kind in of_their_own:
            await player.play(kind, target, seconds * kind.share / shares)
    start, half_way, end = memory
    grown = {name: (start[name], half_way[name], end[name]) for name in parts}
    return Result([*player.tallies.values(), checked], grown, watch, sharing)


def main() -> None:
    made = parser("attack", __doc__)
    made.add_argument("--seconds", type=float, help="time of all attacks")
    made.add_argument("--seed", type=int, default=7)
    made.add_argument("--only", action="append", choices=_NAMES, help="repeatable")
    options = made.parse_args()
    quick: bool = options.quick
    seconds = options.seconds or (6.0 if quick else _WHOLE_S)
    whole = not quick and not options.only and seconds >= _WHOLE_S
    only: tuple[str, ...] = tuple(options.only or _NAMES)
    attacked_s = seconds * (_ATTACKED_SHARE if whole else 1.0)
    with Progress(console=console()) as progress:
        player = Player(options.seed, progress)
        result = run(attack(attacked_s, min(_AFTER_S, seconds), only, player))
    command = f"`python -m bench.attack --seconds {seconds:g} --seed {options.seed}`"
    grids = [*result.grids(), targets(result.targets(whole=whole))]
    about = f"{provenance()}. {command}. {_FIRST_USE}"
    report("attack.md", "Attacks", about, *grids, write=not quick and not options.only)
    for one in result.tallies:
        for failure in one.failures:
            show(f"--seed {options.seed} --only {one.name!r}: {failure}")
    if any(one.failed for one in result.tallies):
        sys.exit(1)


if __name__ == "__main__":
    main()
