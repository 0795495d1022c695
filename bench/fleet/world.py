"""A simulated fleet: Macs that read and write tokens at their own speed, and their traffic.

A Mac reads prompts one after another and writes all its answers concurrently; while it does both,
each gets half of its time. It caches system prompts and conversations, and evicts the least
recently used ends first. Times are seconds of the simulated clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

NEVER: Final = float("inf")
LONGEST_ANSWER_TOKENS: Final = 600
_BATCH_COST: Final = 0.12
"""The cost that a further row adds to a step: decoding is bound by memory."""
_DONE: Final = 1e-6


class End(NamedTuple):
    """The end of a system prompt, or of a turn with its answer."""

    key: int
    tokens: int
    """Tokens from the beginning of the prompt up to here."""
    prompt_tokens: int
    """The same without the answer."""


class SimulatedRequest(NamedTuple):
    """A request of the traffic."""

    number: int
    at_s: float
    ends: tuple[End, ...]
    """Of earlier prompts with which this one begins, the shortest first."""
    prompt_tokens: int
    answer_tokens: int
    own: int = 0
    """Key of the end of this turn; 0 for a prompt that no other one continues."""
    session: int = -1

    @property
    def shared_tokens(self) -> int:
        """Return the tokens that another request has had before."""
        return self.ends[-1].tokens if self.ends else 0

    @property
    def end(self) -> End:
        return End(self.own, self.prompt_tokens + self.answer_tokens, self.prompt_tokens)


class Kind(NamedTuple):
    """The speed of one kind of Mac."""

    slots: int = 8
    read_per_s: float = 1200.0
    step_s: float = 0.02
    cache_tokens: int = 60_000

    @property
    def longest_answer_s(self) -> float:
        """Return the duration of the longest answer in a full batch.

        A Mac with too many requests cannot have fewer before some of them end, whatever the router
        sends to it.
        """
        return LONGEST_ANSWER_TOKENS * self.step_s * (1 + _BATCH_COST * (self.slots - 1))


@dataclass(slots=True, eq=False)
class Row:
    """A request on a Mac."""

    request: SimulatedRequest
    cached_tokens: int = 0
    read_left: float = 0.0
    write_left: float = 0.0
    first_s: float | None = None


@dataclass(slots=True, eq=False)
class Mac:
    """A worker; `advance` runs it up to a time, `next_s` returns the time of its next event."""

    name: str
    kind: Kind
    boot: int = 0
    now_s: float = 0.0
    reading: deque[Row] = field(default_factory=deque)
    writing: list[Row] = field(default_factory=list)
    waiting: deque[Row] = field(default_factory=deque)
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Tokens of each end behind the end before; the least recently used one is first."""
    used_tokens: int = 0
    evicted: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    """Keys of the last evicted ends."""
    draining: bool = False

    @property
    def in_flight(self) -> int:
        """Return the number of requests, including those in the queue of the Mac."""
        return len(self.reading) + len(self.writing) + len(self.waiting)

    def accept(self, request: SimulatedRequest) -> Row:
        row = Row(request, write_left=float(request.answer_tokens))
        if len(self.reading) + len(self.writing) < self.kind.slots:
            self.reading.append(row)
            self._start_reading(row)
        else:
            self.waiting.append(row)
        return row

    def restart(self) -> list[Row]:
        """Clear the memory and all requests; return the lost requests."""
        lost = [*self.reading, *self.writing, *self.waiting]
        self.reading.clear()
        self.writing.clear()
        self.waiting.clear()
        self.cached.clear()
        self.evicted.clear()
        self.used_tokens = 0
        self.boot += 1
        self.draining = False
        return lost

    def advance(self, to_s: float) -> list[Row]:
        """Run until a time; return the answers that ended by then."""
        ended: list[Row] = []
        while self.now_s < to_s:
            step_s = min(self.next_s() - self.now_s, to_s - self.now_s)
            self._work(step_s)
            self.now_s = self.now_s + step_s
            self._end_reading()
            finished = [row for row in self.writing if row.write_left <= _DONE]
            if finished:
                self.writing = [row for row in self.writing if row.write_left > _DONE]
                for row in finished:
                    self._store(row.request, answered=True)
                ended += finished
                self._admit()
        return ended

    def next_s(self) -> float:
        """Return the time at which the next prompt is read or the next answer ends."""
        read_rate, write_rate = self._rates()
        ends = [NEVER]
        if self.reading and read_rate:
            ends.append(self.reading[0].read_left / read_rate)
        if self.writing:
            ends.append(min(row.write_left for row in self.writing) / write_rate)
        return self.now_s + max(min(ends), _DONE)

    def read_time_s(self, tokens: float) -> float:
        """Return the time to read this number of tokens with the current answers."""
        return tokens / (self.kind.read_per_s * (0.5 if self.writing else 1.0))

    @property
    def pending_prefill_tokens(self) -> float:
        """Return the tokens to be read for all prompts of the Mac, by its own estimate."""
        tokens, coming = 0.0, set[int]()
        for at, row in enumerate((*self.reading, *self.waiting)):
            if at == 0 and self.reading:
                tokens += row.read_left
            else:
                tokens += row.request.prompt_tokens - self.cached_tokens(row.request, coming)
            coming.update(end.key for end in row.request.ends)
        return tokens

    def cached_tokens(self, request: SimulatedRequest, coming: Collection[int] = ()) -> int:
        """Return the tokens that need not be read; `coming` keys are cached by then."""
        tokens = 0
        for end in request.ends:
            if end.key not in self.cached and end.key not in coming:
                break
            tokens = end.tokens
        return tokens

    @property
    def write_per_s(self) -> float:
        """Return the tokens per second of each answer while no prompt is read."""
        rows = max(1, len(self.writing))
        return 1 / (self.kind.step_s * (1 + _BATCH_COST * (rows - 1)))

    def _rates(self) -> tuple[float, float]:
        share = 0.5 if self.reading and self.writing else 1.0
        rows = len(self.writing)
        step_s = self.kind.step_s * (1 + _BATCH_COST * (rows - 1)) if rows else NEVER
        return share * self.kind.read_per_s, share / step_s

    def _work(self, duration_s: float) -> None:
        read_rate, write_rate = self._rates()
        if self.reading:
            self.reading[0].read_left -= read_rate * duration_s
        for row in self.writing:
            row.write_left -= write_rate * duration_s

    def _end_reading(self) -> None:
        while self.reading and self.reading[0].read_left <= _DONE:
            row = self.reading.popleft()
            row.first_s = self.now_s
            self._store(row.request)
            self.writing.append(row)
            if self.reading:
                self._start_reading(self.reading[0])

    def _admit(self) -> None:
        while self.waiting and len(self.reading) + len(self.writing) < self.kind.slots:
            row = self.waiting.popleft()
            self.reading.append(row)
            self._start_reading(row)

    def _start_reading(self, row: Row) -> None:
        """Look up the cached part of a prompt as its prefill begins."""
        if self.reading[0] is row:
            row.cached_tokens = self.cached_tokens(row.request)
            row.read_left = row.request.prompt_tokens - row.cached_tokens

    def _store(self, request: SimulatedRequest, *, answered: bool = False) -> None:
        """Keep what has been read, and the answer once it has ended; leaves are evicted first."""
        ends = (*request.ends, request.end) if answered and request.own else request.ends
        begins = (0, *(end.tokens for end in ends))
        for end, begin in reversed([*zip(ends, begins, strict=False)]):
            if end.key not in self.cached:
                self.cached[end.key] = end.tokens - begin
                self.used_tokens += end.tokens - begin
                if end.key in self.evicted:
                    self.evicted.remove(end.key)
            self.cached.move_to_end(end.key)
        while self.used_tokens > self.kind.cache_tokens:
            key, tokens = self.cached.popitem(last=False)
            self.used_tokens -= tokens
            self.evicted.append(key)


class Scenario(NamedTuple):
    """A fleet and its traffic."""

    name: str
    kinds: Sequence[Kind]
    prompts: int
    """Number of system prompts; their frequencies follow Zipf's law."""
    busy: float
    """Mean requests per second of each Mac."""
    bursts: bool = False
    restarts: tuple[tuple[float, int], ...] = ()
    """Restarts: the share of the traffic, and the index of the Mac."""
    gateways: int = 1
    """Gateways that receive the traffic alternately, each with its own state."""
    drains: tuple[tuple[float, int, float], ...] = ()
    """Drains: the share of the traffic, the index of the Mac, and the seconds until it restarts."""
    sessions: bool = False
    """Agents' sessions instead of single requests; `busy` counts those that begin in a second."""


def traffic(scenario: Scenario, requests: int, rng: Random) -> Iterator[SimulatedRequest]:
    """Yield the requests of a scenario in order of time."""
    weights = [1 / rank for rank in range(1, scenario.prompts + 1)]
    lengths = [rng.randint(400, 4000) for _ in range(scenario.prompts)]
    prompts = rng.choices(range(scenario.prompts), weights, k=requests)
    rate, now_s = scenario.busy * len(scenario.kinds), 0.0
    for number, prompt in enumerate(prompts):
        # Bursts alternate with quiet times of a quarter of their load.
        load_factor = (1.6 if int(now_s / 30) % 2 else 0.4) if scenario.bursts else 1.0
        now_s += rng.expovariate(rate * load_factor)
        answer = min(LONGEST_ANSWER_TOKENS, max(5, int(rng.lognormvariate(4.3, 0.8))))
        tokens = lengths[prompt]
        end = End(prompt + 1, tokens, tokens)
        yield SimulatedRequest(number, now_s, (end,), tokens + rng.randint(20, 200), answer)


class Step(NamedTuple):
    """One step of an agent's session."""

    new_tokens: int
    """Of the result of a tool, or of the user's question."""
    answer_tokens: int
    pause_s: float
    """From the end of the last answer: the time that a tool takes."""


class Sessions:
    """Agents' sessions: each request begins with the whole session so far.

    A step follows the answer of the last one, so the times of the requests depend on the rule; what
    they ask does not.
    """

    _STEPS = 40
    _LIMIT_TOKENS = 60_000

    def __init__(self, scenario: Scenario, requests: int, rng: Random) -> None:
        weights = [1 / rank for rank in range(1, scenario.prompts + 1)]
        lengths = [rng.randint(1200, 8000) for _ in range(scenario.prompts)]
        rate, now_s, left = scenario.busy * len(scenario.kinds), 0.0, requests
        self._steps: list[list[Step]] = []
        self.first: list[SimulatedRequest] = []
        while left > 0:
            steps = [
                Step(
                    rng.randint(200, 2200),
                    min(LONGEST_ANSWER_TOKENS, max(20, int(rng.lognormvariate(5.0, 0.7)))),
                    rng.expovariate(1 / 4),
                )
                for _ in range(rng.randint(5, self._STEPS))
            ]
            left -= len(steps)
            (prompt,) = rng.choices(range(scenario.prompts), weights)
            now_s += rng.expovariate(rate)
            session = len(self._steps)
            self._steps.append(steps)
            tokens = lengths[prompt]
            ends = (End(prompt + 1, tokens, tokens),)
            self.first.append(self._request(session, 0, ends, now_s))

    def next(self, request: SimulatedRequest, now_s: float) -> SimulatedRequest | None:
        """Return the step after one whose answer has ended; None after the last one."""
        step = len(request.ends)
        steps = self._steps[request.session]
        ends = (*request.ends, request.end)
        if step == len(steps) or request.end.tokens > self._LIMIT_TOKENS:
            return None
        return self._request(request.session, step, ends, now_s + steps[step].pause_s)

    def _request(
        self, session: int, step: int, ends: tuple[End, ...], at_s: float
    ) -> SimulatedRequest:
        new_tokens, answer_tokens, _ = self._steps[session][step]
        number = 1_000_000 + 1000 * session + step
        return SimulatedRequest(
            number, at_s, ends, ends[-1].tokens + new_tokens, answer_tokens, number, session
        )
