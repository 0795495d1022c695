"""A simulated fleet: Macs that read and write tokens at their own speed, and the traffic they get.

A Mac reads prompts one after another and writes all its answers side by side; while it does both,
each gets half of its time. It keeps system prompts that it has read, the least recently used ones
go first, and tells nobody when. Times are seconds of the simulated clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

NEVER: Final = float("inf")
LONGEST_ANSWER_TOKENS: Final = 600
_BATCH_COST: Final = 0.12
"""What a further row adds to a step: decoding waits for memory more than it computes."""
_DONE: Final = 1e-6


class Ask(NamedTuple):
    """One request of the traffic."""

    number: int
    at_s: float
    prefix: int
    prefix_tokens: int
    own_tokens: int
    answer_tokens: int


class Kind(NamedTuple):
    """How fast one kind of Mac is."""

    slots: int = 8
    read_per_s: float = 1200.0
    step_s: float = 0.02
    kept_tokens: int = 60_000

    @property
    def longest_answer_s(self) -> float:
        """Tell how long the longest answer takes beside a full batch.

        One that has so many requests at a moment cannot have fewer before some of them have ended,
        whatever it is sent.
        """
        return LONGEST_ANSWER_TOKENS * self.step_s * (1 + _BATCH_COST * (self.slots - 1))


@dataclass(slots=True, eq=False)
class Row:
    """One request on one Mac."""

    ask: Ask
    cached_tokens: int = 0
    read_left: float = 0.0
    write_left: float = 0.0
    first_s: float | None = None


@dataclass(slots=True, eq=False)
class Mac:
    """One worker; `advance` brings it to a moment, `next_s` tells when something ends by itself."""

    name: str
    kind: Kind
    boot: int = 0
    now_s: float = 0.0
    reading: deque[Row] = field(default_factory=deque)
    writing: list[Row] = field(default_factory=list)
    waiting: deque[Row] = field(default_factory=deque)
    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @property
    def in_flight(self) -> int:
        """Count the requests that it has, those in its own line too."""
        return len(self.reading) + len(self.writing) + len(self.waiting)

    def take(self, ask: Ask) -> Row:
        """Begin with a request, or put it into the Mac's own line where no slot is free."""
        row = Row(ask, write_left=float(ask.answer_tokens))
        if len(self.reading) + len(self.writing) < self.kind.slots:
            self.reading.append(row)
            self._open(row)
        else:
            self.waiting.append(row)
        return row

    def restart(self) -> list[Row]:
        """Lose all that it has and holds; return the requests that were on it."""
        lost = [*self.reading, *self.writing, *self.waiting]
        self.reading.clear()
        self.writing.clear()
        self.waiting.clear()
        self.kept.clear()
        self.boot += 1
        return lost

    def advance(self, to_s: float) -> list[Row]:
        """Work until a moment; return the answers that ended by then."""
        ended: list[Row] = []
        while self.now_s < to_s:
            step_s = min(self.next_s() - self.now_s, to_s - self.now_s)
            self._work(step_s)
            self.now_s = self.now_s + step_s
            self._end_reading()
            done = [row for row in self.writing if row.write_left <= _DONE]
            if done:
                self.writing = [row for row in self.writing if row.write_left > _DONE]
                ended += done
                self._let_in()
        return ended

    def next_s(self) -> float:
        """Tell when the next prompt is read or the next answer ends."""
        read_rate, write_rate = self._rates()
        ends = [NEVER]
        if self.reading and read_rate:
            ends.append(self.reading[0].read_left / read_rate)
        if self.writing:
            ends.append(min(row.write_left for row in self.writing) / write_rate)
        return self.now_s + max(min(ends), _DONE)

    def read_time_s(self, tokens: float) -> float:
        """Tell how long reading so many tokens takes beside what is written now."""
        return tokens / (self.kind.read_per_s * (0.5 if self.writing else 1.0))

    @property
    def pending_prefill_tokens(self) -> float:
        """Count what is to be read of all prompts that it has, as far as it can know."""
        tokens, known = 0.0, set(self.kept)
        for at, row in enumerate((*self.reading, *self.waiting)):
            if at == 0 and self.reading:
                tokens += row.read_left
            else:
                tokens += row.ask.own_tokens
                tokens += 0 if row.ask.prefix in known else row.ask.prefix_tokens
            known.add(row.ask.prefix)
        return tokens

    @property
    def write_per_s(self) -> float:
        """Tell how many tokens a second each answer gets while nothing is read."""
        rows = max(1, len(self.writing))
        return 1 / (self.kind.step_s * (1 + _BATCH_COST * (rows - 1)))

    def _rates(self) -> tuple[float, float]:
        share = 0.5 if self.reading and self.writing else 1.0
        rows = len(self.writing)
        step_s = self.kind.step_s * (1 + _BATCH_COST * (rows - 1)) if rows else NEVER
        return share * self.kind.read_per_s, share / step_s

    def _work(self, for_s: float) -> None:
        read_rate, write_rate = self._rates()
        if self.reading:
            self.reading[0].read_left -= read_rate * for_s
        for row in self.writing:
            row.write_left -= write_rate * for_s

    def _end_reading(self) -> None:
        while self.reading and self.reading[0].read_left <= _DONE:
            row = self.reading.popleft()
            row.first_s = self.now_s
            self._keep(row.ask)
            self.writing.append(row)
            if self.reading:
                self._open(self.reading[0])

    def _let_in(self) -> None:
        while self.waiting and len(self.reading) + len(self.writing) < self.kind.slots:
            row = self.waiting.popleft()
            self.reading.append(row)
            self._open(row)

    def _open(self, row: Row) -> None:
        """See what of a prompt is kept, at the moment when its reading begins."""
        if self.reading[0] is row:
            known = row.ask.prefix in self.kept
            row.cached_tokens = row.ask.prefix_tokens if known else 0
            row.read_left = row.ask.prefix_tokens - row.cached_tokens + row.ask.own_tokens

    def _keep(self, ask: Ask) -> None:
        self.kept[ask.prefix] = ask.prefix_tokens
        self.kept.move_to_end(ask.prefix)
        while sum(self.kept.values()) > self.kind.kept_tokens:
            self.kept.popitem(last=False)


class Scenario(NamedTuple):
    """A fleet and what it has to bear."""

    name: str
    kinds: Sequence[Kind]
    prompts: int
    """System prompts that there are; how often each is used falls off as Zipf has it."""
    busy: float
    """Requests a second of each Mac, in the mean."""
    bursts: bool = False
    restarts: tuple[tuple[float, int], ...] = ()
    """At which share of the traffic which Mac starts anew."""
    sights: int = 1
    """Gateways that take turns with it, each with its own knowledge."""


def traffic(scenario: Scenario, requests: int, rng: Random) -> Iterator[Ask]:
    """Draw the requests of a scenario in the order of their time."""
    weights = [1 / rank for rank in range(1, scenario.prompts + 1)]
    lengths = [rng.randint(400, 4000) for _ in range(scenario.prompts)]
    prompts = rng.choices(range(scenario.prompts), weights, k=requests)
    rate, now_s = scenario.busy * len(scenario.kinds), 0.0
    for number, prompt in enumerate(prompts):
        # Every other minute is four times as busy as the ones between.
        swing = (1.6 if int(now_s / 30) % 2 else 0.4) if scenario.bursts else 1.0
        now_s += rng.expovariate(rate * swing)
        answer = min(LONGEST_ANSWER_TOKENS, max(5, int(rng.lognormvariate(4.3, 0.8))))
        yield Ask(number, now_s, prompt, lengths[prompt], rng.randint(20, 200), answer)
