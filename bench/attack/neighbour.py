"""The neighbour of an attack: another key's small chats at a fixed pace, and all memory beside it.

One neighbour asks a worker with prepared answers, so that only the gateway makes it wait; another
shares the engine of the attacked worker, whose time its lanes divide among all who ask.

`python -m bench.attack.neighbour PORT MODEL` reads a key from standard input, asks in a process of
its own, so that it never waits for a turn of the attacker, and prints a line for each answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Final, NamedTuple

from bench.attack.attack import Tally
from bench.attack.http_client import chat_body, encode, send
from bench.gateway import backend
from bench.harness.process_cost import resident_bytes
from bench.harness.processes import end, start
from bench.harness.tables import Grid, Target

MODEL: Final = "demo"
_PACE_S, _SHARING_PACE_S = 0.1, 0.5
"""It does not wait for an answer before it asks again: a stall counts as often as it is felt.

At the engine of the attacks ten a second would be an attack, as that has one core with all others.
"""
_WARM_UP_S: Final = 2.0
"""The first answers of a process are slow."""
_SAMPLE_S: Final = 0.5
KEPT_SHARE: Final = 1.10
_LONGER_MS: Final = 50.0
_STALL_S: Final = 3.0


class Wait(NamedTuple):
    """One answer to the neighbour."""

    sent_s: float
    waited_s: float
    status: int


class Resident(NamedTuple):
    """Resident memory of one process, in MB."""

    before: float
    peak: float
    after: float


@dataclass
class Effect:
    """What one attack does to the neighbour and to the memory of the attacked processes."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    """When it was played, by the monotonic clock."""
    memory: Mapping[str, Resident] = field(default_factory=dict)
    """By the part, of the last time."""
    after_s: float = 0.0
    """How long after its end the memory was within its bound, or was last looked at."""


class Neighbourhood:
    """The waits of the running neighbour, and the effect of each attack on it."""

    def __init__(
        self, processes: Mapping[str, int], *, after_s: float = 0.0, model: str = backend.MODEL
    ) -> None:
        """Watch the memory of these processes, for so long after each attack at most.

        The neighbour asks this model.
        """
        self._model = model
        self._is_judged = model == backend.MODEL
        self._processes = processes
        self._after_s = after_s
        self.waits: list[Wait] = []
        self.effects: dict[str, Effect] = {}
        self.alone_ms = 0.0

    @contextlib.asynccontextmanager
    async def running(self, port: int, key: str, alone_s: float) -> AsyncIterator[None]:
        """Run the neighbour within the context: alone first, for its 99th percentile then."""
        command = (sys.executable, "-m", __name__, str(port), self._model)
        process = await start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(f"{key}\n".encode())
        process.stdin.close()
        reading = asyncio.create_task(self._read(process))
        try:
            await asyncio.sleep(_WARM_UP_S)
            self.waits.clear()
            await asyncio.sleep(alone_s)
            self.alone_ms = p99_ms(self.waits)
            yield
        finally:
            reading.cancel()
            await end(process)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.waits.append(Wait(*json.loads(line)))

    @contextlib.asynccontextmanager
    async def beside(self, name: str, *, settle: bool) -> AsyncIterator[None]:
        """Measure within the context; with `settle`, then wait until the memory is back."""
        effect = self.effects.setdefault(name, Effect())
        before = await self.resident_mb()
        peak = dict(before)
        sampling = asyncio.create_task(self._sample(peak))
        began_s = time.monotonic()
        try:
            yield
        finally:
            sampling.cancel()
        ended_s = time.monotonic()
        effect.spans.append((began_s, ended_s))
        while True:
            after, effect.after_s = await self.resident_mb(), time.monotonic() - ended_s
            back = all(after[part] <= KEPT_SHARE * before[part] for part in before)
            if back or not settle or effect.after_s >= self._after_s:
                break
            await asyncio.sleep(1.0)
        effect.memory = {
            part: Resident(before[part], max(peak[part], after[part]), after[part])
            for part in before
        }

    async def resident_mb(self) -> dict[str, float]:
        return {
            part: await asyncio.to_thread(resident_bytes, process_id) / 1e6
            for part, process_id in self._processes.items()
        }

    async def _sample(self, peak: dict[str, float]) -> None:
        while True:
            for part, resident in (await self.resident_mb()).items():
                peak[part] = max(peak[part], resident)
            await asyncio.sleep(_SAMPLE_S)

    def waits_beside(self, name: str) -> list[Wait]:
        """Return the answers to what the neighbour sent while an attack was played."""
        spans = self.effects[name].spans
        return [one for one in self.waits if any(a <= one.sent_s < b for a, b in spans)]

    def judge(self, tallies: Iterable[Tally]) -> None:
        """Record each answer that the neighbour did not get, or not in time, with the input."""
        for tally in tallies:
            for wait in self.waits_beside(tally.name):
                late = self._is_judged and wait.waited_s > self.alone_ms / 1000 + _STALL_S
                if wait.status != 200 or late:
                    problem = f"the neighbour got {wait.status} after {wait.waited_s:.1f} s"
                    tally.fail(problem, tally.input_at(wait.sent_s + wait.waited_s))

    def table(self) -> Grid:
        states = [f"{part} {state}" for part in self._processes for state in Resident._fields]
        columns = (
            *("attack", "chats", "neighbour p99, ms", "longest, ms", *states),
            "looked at after, s",
        )
        rows = []
        for name, effect in self.effects.items():
            waits = self.waits_beside(name)
            longest_s = max((one.waited_s for one in waits), default=0.0)
            memory = [value for part in self._processes for value in effect.memory[part]]
            figures = (p99_ms(waits), 1000 * longest_s, *memory)
            after = f"{effect.after_s:.0f}"
            rows.append((name, f"{len(waits):,}", *(f"{one:.1f}" for one in figures), after))
        title = "A neighbour's small chats with prepared answers, which wait for the gateway only"
        if not self._is_judged:
            title = "Those of a neighbour that shares the engine with the attacks, in its turns"
        title += f"; 99th percentile alone: {self.alone_ms:.1f} ms"
        return Grid(title, columns, rows)

    def targets(self) -> Iterator[Target]:
        for name, effect in self.effects.items() if self._is_judged else ():
            longer_ms = p99_ms(self.waits_beside(name)) - self.alone_ms
            yield Target(f"{name}: neighbour's p99 longer than alone, ms", longer_ms, _LONGER_MS)
            for part, memory in effect.memory.items():
                title = f"{name}: memory of the {part} 60 s after, to that before"
                yield Target(title, memory.after / memory.before, KEPT_SHARE)


def p99_ms(waits: Sequence[Wait]) -> float:
    if len(waits) < 2:
        return 0.0
    return 1000 * quantiles([one.waited_s for one in waits], n=100, method="inclusive")[98]


async def _ask_for_ever(port: int, model: str, key: str) -> None:
    raw = encode(json.dumps(chat_body(model, "Hi", max_tokens=2)).encode(), key=key)
    pace_s = _PACE_S if model == backend.MODEL else _SHARING_PACE_S

    async def ask() -> None:
        sent_s = time.monotonic()
        answer = await send(port, raw)
        line = json.dumps((sent_s, time.monotonic() - sent_s, answer.status))
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as group:
        while True:
            group.create_task(ask())
            await asyncio.sleep(pace_s)


if __name__ == "__main__":
    asyncio.run(_ask_for_ever(int(sys.argv[1]), sys.argv[2], sys.stdin.readline().strip()))
