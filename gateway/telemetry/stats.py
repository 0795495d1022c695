"""What requests have added up to, by the place where they ran.

How durations spread: counts in buckets from ten microseconds to a quarter of an hour.

The bounds are Renard's ten to a decade. Each is about a quarter above the last, so a percentile is
right to about an eighth; and 1, 2.5 and 5 are among them, which is what Prometheus is shown.

The last minutes: snapshots of sums, taken beside all requests, whose differences are windows.

What a request adds it adds once, to sums that only grow; a window is the sums of now less those of
then. So no window costs a request anything, and none counts a request in part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add, sub
from types import MappingProxyType
from typing import NamedTuple, TypeVar

_STEPS = ("1", "1.25", "1.6", "2", "2.5", "3.15", "4", "5", "6.3", "8")
BOUNDS_S = tuple(float(f"{step}e{ten}") for ten in range(-5, 3) for step in _STEPS)
"""Each bucket holds what is at most its bound; one more holds all that is above the last."""
Counts = tuple[int, ...]
_ROUNDING = 1e-6
NONE: Counts = (0,) * (len(BOUNDS_S) + 1)


class LogHistogram:
    """Counts durations: two additions for each."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = list(NONE)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


def percentile(counts: Sequence[int], share: float) -> float:
    """Find what this share of the durations took at most; 0 where there is none."""
    rank = share * sum(counts) - _ROUNDING
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = BOUNDS_S[index - 1] if index else 0.0
            high = BOUNDS_S[min(index, len(BOUNDS_S) - 1)]
            return low + (high - low) * max(0.0, rank - below) / count
        below += count
    return 0.0


def cumulative(counts: Sequence[int], bounds_s: Sequence[float]) -> list[tuple[str, int]]:
    """List how many took at most each of these bounds of ours, as Prometheus does."""
    told = []
    below, start = 0, 0
    for bound in bounds_s:
        end = bisect_left(BOUNDS_S, bound) + 1
        below += sum(counts[start:end])
        start = end
        told.append((str(bound), below))
    return [*told, ("+Inf", below + sum(counts[start:]))]


NO_NAMES: Mapping[str, int] = MappingProxyType({})
NO_STEPS: Mapping[int, int] = MappingProxyType({})
Name = TypeVar("Name", str, int)


class Place(NamedTuple):
    """One lane of one worker, as one pool uses it for one model."""

    pool: str
    lane: str
    worker_id: str
    model: str


class Figures(NamedTuple):
    """Sums over requests; those of a window are what is now less what was then."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasons: Mapping[str, int] = NO_NAMES
    bypass: Mapping[str, int] = NO_NAMES
    prefix: Mapping[str, int] = NO_NAMES
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: Mapping[int, int] = NO_STEPS
    """Drafts by how many of their tokens were accepted."""
    first_token_s: Counts = NONE
    token_s: Counts = NONE
    wait_s: Counts = NONE
    answer_s: Counts = NONE
    added_s: Counts = NONE

    def since(self, then: Figures) -> Figures:
        """Return what has come since then."""
        return Figures(
            self.requests - then.requests,
            self.failed - then.failed,
            self.prompt_tokens - then.prompt_tokens,
            self.completion_tokens - then.completion_tokens,
            self.cached_tokens - then.cached_tokens,
            _since(self.reasons, then.reasons),
            _since(self.bypass, then.bypass),
            _since(self.prefix, then.prefix),
            self.drafts - then.drafts,
            self.drafted - then.drafted,
            self.accepted - then.accepted,
            _since(self.histogram, then.histogram),
            _spread_since(self.first_token_s, then.first_token_s),
            _spread_since(self.token_s, then.token_s),
            _spread_since(self.wait_s, then.wait_s),
            _spread_since(self.answer_s, then.answer_s),
            _spread_since(self.added_s, then.added_s),
        )

    def plus(self, other: Figures) -> Figures:
        """Add the figures of another place."""
        return Figures(
            self.requests + other.requests,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            Counter(self.reasons) + Counter(other.reasons),
            Counter(self.bypass) + Counter(other.bypass),
            Counter(self.prefix) + Counter(other.prefix),
            self.drafts + other.drafts,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            Counter(self.histogram) + Counter(other.histogram),
            _spread_sum(self.first_token_s, other.first_token_s),
            _spread_sum(self.token_s, other.token_s),
            _spread_sum(self.wait_s, other.wait_s),
            _spread_sum(self.answer_s, other.answer_s),
            _spread_sum(self.added_s, other.added_s),
        )


NOTHING = Figures()


class Sums:
    """The sums of one place as they grow."""

    def __init__(self) -> None:
        self.requests = self.failed = 0
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.reasons: Counter[str] = Counter()
        self.bypass: Counter[str] = Counter()
        self.prefix: Counter[str] = Counter()
        self.drafts = self.drafted = self.accepted = 0
        self.histogram: Counter[int] = Counter()
        self.first_token_s = LogHistogram()
        self.token_s = LogHistogram()
        self.wait_s = LogHistogram()
        self.answer_s = LogHistogram()
        self.added_s = LogHistogram()
        self._frozen = Figures()

    def frozen(self) -> Figures:
        """Take a snapshot; the last one where nothing has come since."""
        last = self._frozen
        if self.requests != last.requests:
            self._frozen = Figures(
                self.requests,
                self.failed,
                self.prompt_tokens,
                self.completion_tokens,
                self.cached_tokens,
                dict(self.reasons),
                dict(self.bypass),
                dict(self.prefix),
                self.drafts,
                self.drafted,
                self.accepted,
                dict(self.histogram),
                _unless_same(self.first_token_s.counts, last.first_token_s),
                _unless_same(self.token_s.counts, last.token_s),
                _unless_same(self.wait_s.counts, last.wait_s),
                _unless_same(self.answer_s.counts, last.answer_s),
                _unless_same(self.added_s.counts, last.added_s),
            )
        return self._frozen


def total(figures: Iterable[Figures]) -> Figures:
    """Add up the figures of several places."""
    return reduce(Figures.plus, figures, NOTHING)


def _since(now: Mapping[Name, int], then: Mapping[Name, int]) -> dict[Name, int]:
    return {name: more for name, count in now.items() if (more := count - then.get(name, 0))}


def _spread_since(now: Counts, then: Counts) -> Counts:
    if then is NONE or now is then:
        return now if then is NONE else NONE
    return tuple(map(sub, now, then))


def _spread_sum(one: Counts, other: Counts) -> Counts:
    if one is NONE or other is NONE:
        return other if one is NONE else one
    return tuple(map(add, one, other))


def _unless_same(counts: list[int], last: Counts) -> Counts:
    """Take a snapshot; the last one where nothing has come since, so that it is seen at once."""
    now = tuple(counts)
    return last if now == last else now


STEP_S = 10.0
LONGEST_S = 900.0


class Snapshot(NamedTuple):
    """All sums at one moment."""

    at_s: float
    places: Mapping[Place, Figures]
    everywhere: Figures
    """The sum over all places."""

    def since(self, then: Snapshot) -> dict[Place, Figures]:
        """Return what has come since then."""
        return {
            place: figures.since(then.places.get(place, NOTHING))
            for place, figures in self.places.items()
            if figures is not then.places.get(place)
        }


class Windows:
    """Snapshots of the last quarter of an hour. `clock` is monotonic: no jump of the day's time."""

    def __init__(
        self, look: Callable[[], Mapping[Place, Figures]], clock: Callable[[], float]
    ) -> None:
        self._look = look
        self._clock = clock
        self._kept: deque[Snapshot] = deque([Snapshot(clock(), {}, NOTHING)])

    async def step(self) -> None:
        """Keep a snapshot; to be called every `STEP_S`."""
        self.keep()

    def keep(self) -> None:
        """Keep a snapshot for as long as any window may reach back."""
        now = self.latest()
        self._kept.append(now)
        while now.at_s - self._kept[1].at_s >= LONGEST_S:
            self._kept.popleft()

    def latest(self) -> Snapshot:
        """Take a snapshot for whoever reads now."""
        places = self._look()
        return Snapshot(self._clock(), places, total(places.values()))

    def reach_back(self, now: Snapshot, window_s: float) -> list[Snapshot]:
        """List the snapshots of a window, its beginning first and `now` last.

        It begins with the newest one that is old enough, or where this gateway began.
        """
        found = [now]
        for snapshot in reversed(self._kept):
            found.append(snapshot)
            if now.at_s - snapshot.at_s >= window_s:
                break
        return found[::-1]
