"""What requests have added up to, by the place where they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import add, sub
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from gateway.buckets import NONE, Buckets, Counts

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
        self.first_token_s = Buckets()
        self.token_s = Buckets()
        self.wait_s = Buckets()
        self.answer_s = Buckets()
        self.added_s = Buckets()
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
