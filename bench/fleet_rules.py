"""Rules that send a request to a Mac: ours, and those that people use instead."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Protocol

from bench.fleet_world import Ask, Mac
from gateway.domain import Case, FleetView, Holding, LaneView, Usage, WorkerView
from gateway.prefixes import Prefixes
from gateway.routing import decide
from policies.document import shipped_policy
from policies.profile import Endpoint, RequestProfile
from workers.adapters.report import LaneReport

_MODEL = "demo"


class Rule(Protocol):
    """One way to choose. `sent` and `answered` are what a gateway sees of its own requests."""

    name: str

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        """Say which Mac gets a request; None lets it wait in the gateway until one has ended."""

    def sent(self, ask: Ask, mac: Mac, now_s: float) -> None:
        """Hear that it was sent."""

    def answered(self, ask: Ask, mac: Mac, cached_tokens: int | None) -> None:
        """Hear that it has ended; None where it failed."""


class _Deaf:
    def sent(self, ask: Ask, mac: Mac, now_s: float) -> None:
        """Take no notice."""

    def answered(self, ask: Ask, mac: Mac, cached_tokens: int | None) -> None:
        """Take no notice."""


class RoundRobin(_Deaf):
    """One after another."""

    name = "round robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        self._next = (self._next + 1) % len(macs)
        return self._next


class LeastLoad(_Deaf):
    """The one with the fewest requests for its slots."""

    name = "least load"

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        return min(range(len(macs)), key=lambda at: macs[at].in_flight / macs[at].kind.slots)


class BoundedHashing(_Deaf):
    """Consistent hashing of the system prompt, none above 1.25 of the mean (Mirrokni, 2016)."""

    name = "hashing, bounded loads"
    _POINTS = 64

    def __init__(self, macs: int) -> None:
        points = [(_hashed(f"{mac}:{n}"), mac) for mac in range(macs) for n in range(self._POINTS)]
        self._ring = sorted(points)

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        bound = 1.25 * (sum(mac.in_flight for mac in macs) + 1) / len(macs)
        start = bisect(self._ring, (_hashed(f"prompt {ask.prefix}"), 0))
        for step in range(len(self._ring)):
            _, at = self._ring[(start + step) % len(self._ring)]
            if macs[at].in_flight + 1 <= max(bound, 1):
                return at
        return min(range(len(macs)), key=lambda one: macs[one].in_flight)


class CacheAware:
    """SGLang's router: the longest match, unless loads differ by more than its thresholds.

    Its own defaults let one worker have 64 requests more than another; here it is one lane, which
    is kinder to it on fleets of this size. Its tree forgets nothing that a worker has evicted.
    """

    name = "SGLang's cache-aware rule"
    _MATCH, _RELATIVE = 0.3, 1.5

    def __init__(self) -> None:
        self._had: dict[int, Counter[int]] = defaultdict(Counter)
        self._size: Counter[int] = Counter()

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        loads = [mac.in_flight for mac in macs]
        most, least = max(loads), min(loads)
        if most - least > macs[0].kind.slots and most > self._RELATIVE * least:
            return loads.index(least)
        share = ask.prefix_tokens / (ask.prefix_tokens + ask.own_tokens)
        had = self._had.get(ask.prefix)
        if had and share > self._MATCH:
            return min(had, key=lambda at: loads[at])
        return min(range(len(macs)), key=lambda at: self._size[at])

    def sent(self, ask: Ask, mac: Mac, now_s: float) -> None:
        at = int(mac.name)
        if not self._had[ask.prefix][at]:
            self._size[at] += ask.prefix_tokens
        self._had[ask.prefix][at] += 1

    def answered(self, ask: Ask, mac: Mac, cached_tokens: int | None) -> None:
        """Take no notice."""


class Oracle(_Deaf):
    """Sees every Mac's cache, line and speed, and takes the one with the first token first."""

    name = "oracle"

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        return min(range(len(macs)), key=lambda at: self._first_s(ask, macs[at]))

    def _first_s(self, ask: Ask, mac: Mac) -> float:
        known = ask.prefix in mac.kept or any(
            row.ask.prefix == ask.prefix for row in (*mac.reading, *mac.waiting)
        )
        own = ask.own_tokens + (0 if known else ask.prefix_tokens)
        ahead = sum(row.read_left for row in mac.reading)
        wait_s = 0.0
        if mac.in_flight >= mac.kind.slots:
            left = sorted(row.write_left for row in mac.writing) or [100.0]
            nth = min(len(mac.waiting), len(left) - 1)
            wait_s = left[nth] * mac.kind.step_s * 2
            ahead += sum(row.ask.own_tokens for row in mac.waiting)
        return wait_s + mac.read_time_s(ahead + own)


class Ours:
    """The gateway's own `decide` and `Prefixes`; what is not free waits in the gateway."""

    name = "paceline"

    def __init__(self, rng: Random) -> None:
        self._now_s = 0.0
        self._prefixes = Prefixes(lambda: self._now_s)
        self._rng = rng
        self._policy = shipped_policy()
        self._profile = RequestProfile(endpoint=Endpoint.CHAT, model=_MODEL)
        self._expected: dict[int, bool] = {}

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        self._now_s = now_s
        fleet = FleetView(tuple(map(_seen, macs)), frozenset((_MODEL,)))
        case = Case(self._policy, self._profile, prefix=str(ask.prefix))
        decision = decide(case, self._prefixes.mark(fleet, case.prefix), self._rng)
        for one in decision.candidates:
            at = int(one.worker_id)
            if macs[at].in_flight < macs[at].kind.slots:
                self._expected[ask.number] = one.holder
                return at
        return None

    def sent(self, ask: Ask, mac: Mac, now_s: float) -> None:
        self._now_s = now_s
        self._prefixes.sent(str(ask.prefix), _holding(mac), self._policy.prefix)

    def answered(self, ask: Ask, mac: Mac, cached_tokens: int | None) -> None:
        usage = None if cached_tokens is None else Usage(1, 1, cached_tokens)
        expected = self._expected.pop(ask.number)
        self._prefixes.told(str(ask.prefix), _holding(mac), usage, expected=expected)


def _seen(mac: Mac) -> WorkerView:
    lane = LaneView.of(LaneReport(name="vlm", slots=mac.kind.slots), mac.in_flight)
    return WorkerView.of(mac.name, (_MODEL,), (lane,), boot_id=str(mac.boot))


def _holding(mac: Mac) -> Holding:
    return mac.name, str(mac.boot)


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
