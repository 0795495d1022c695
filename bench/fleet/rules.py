"""Rules that send a request to a Mac: ours, and those that people use instead."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import Protocol

from bench.fleet.world import Ask, Mac
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, WorkerRegistry
from gateway.fleet.worker import Lease
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.select import RoutingRequest, decide
from gateway.types import Usage
from policies.document import default_policy
from policies.request.profile import Endpoint, RequestProfile
from workers.protocol import MAX_REPORTED_PREFIXES, LaneReport, WorkerReport

_MODEL = "demo"
_CHARS_A_TOKEN = 4
_TOLD_EVERY_S = 0.5
"""How often gateways tell each other."""


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
        ahead = mac.pending_prefill_tokens
        wait_s = 0.0
        if mac.in_flight >= mac.kind.slots:
            left = sorted(row.write_left for row in mac.writing) or [100.0]
            nth = min(len(mac.waiting), len(left) - 1)
            wait_s = left[nth] * mac.kind.step_s * 2
        return wait_s + mac.read_time_s(ahead + own)


class Ours:
    """The gateway's own `decide`, registry and prefix index; requests without a slot wait in it.

    Of Macs it knows what it sent and got back, and what their heartbeats tell. Several gateways
    take turns with the traffic and hear of each other's claims and heartbeats half a second later.
    """

    name = "paceline"

    def __init__(self, gateways: int, rng: Random) -> None:
        self._now_s = 0.0
        self._rng = rng
        self._policy = default_policy()
        self._fleets = [WorkerRegistry(lambda: self._now_s, rng.random) for _ in range(gateways)]
        self._prefixes = [PrefixIndex(lambda: self._now_s) for _ in range(gateways)]
        self._leases: dict[int, Lease] = {}
        self._beats_s: dict[tuple[str, int], float] = {}
        """When each boot of a Mac beat last."""
        self._exchanged_s = 0.0

    def choose(self, ask: Ask, macs: Sequence[Mac], now_s: float) -> int | None:
        self._now_s = now_s
        self._hear(macs)
        fleet = self._fleets[ask.number % len(self._fleets)]
        prefixes = self._prefixes[ask.number % len(self._fleets)]
        profile = _profile(ask)
        case = RoutingRequest(self._policy, profile, prefix_key=str(ask.prefix))
        for first_only in (True, False):
            view = prefixes.annotate(fleet.view(), case.prefix_key)
            decision = decide(case, view, self._rng, first_only=first_only)
            for one in decision.candidates:
                if (lease := fleet.acquire(one)) is not None:
                    self._leases[ask.number] = lease
                    return int(one.worker_id)
            if decision.complete:
                break
        return None

    def sent(self, ask: Ask, mac: Mac, now_s: float) -> None:
        self._now_s = now_s
        holding = self._leases[ask.number].boot
        prefixes = self._prefixes[ask.number % len(self._fleets)]
        prefixes.record_dispatch(str(ask.prefix), holding, self._policy.prefix)

    def answered(self, ask: Ask, mac: Mac, cached_tokens: int | None) -> None:
        self._now_s = max(self._now_s, mac.now_s)
        lease = self._leases.pop(ask.number)
        fleet = self._fleets[ask.number % len(self._fleets)]
        prefixes = self._prefixes[ask.number % len(self._fleets)]
        lost = cached_tokens is None
        fleet.release(lease, AttemptResult.FAILED if lost else AttemptResult.SUCCEEDED)
        usage = None if lost else Usage(1, 1, cached_tokens or 0)
        expected = lease.candidate.prefix_cached
        prefixes.record_usage(str(ask.prefix), lease.boot, usage, expected=expected)

    def _hear(self, macs: Sequence[Mac]) -> None:
        """Take in the heartbeats that are due, and what other gateways tell."""
        for mac in macs:
            boot = mac.name, mac.boot
            if self._beats_s.get(boot, -HEARTBEAT_INTERVAL_S) + HEARTBEAT_INTERVAL_S <= self._now_s:
                self._beats_s[boot] = self._now_s
                first, *others = self._fleets
                report = _report(mac)
                first.heartbeat(report)
                for fleet in others:
                    fleet.merge_remote(report, _TOLD_EVERY_S)
                for prefixes in self._prefixes:
                    prefixes.record_report(report)
        if self._exchanged_s + _TOLD_EVERY_S <= self._now_s:
            self._exchanged_s = self._now_s
            news = [prefixes.take_pending() for prefixes in self._prefixes]
            for by, claims in enumerate(news):
                for at, prefixes in enumerate(self._prefixes):
                    for claim in claims if at != by else ():
                        prefixes.merge(claim, _TOLD_EVERY_S)


def _profile(ask: Ask) -> RequestProfile:
    chars = _CHARS_A_TOKEN * (ask.prefix_tokens + ask.own_tokens)
    return RequestProfile(endpoint=Endpoint.CHAT, model=_MODEL, text_chars=chars)


def _report(mac: Mac) -> WorkerReport:
    """Tell what a worker tells of itself."""
    lane = LaneReport(
        name="vlm",
        running=len(mac.reading) + len(mac.writing),
        waiting=len(mac.waiting),
        slots=mac.kind.slots,
        pending_prefill_tokens=round(mac.pending_prefill_tokens),
        prefill_tokens_per_s=mac.kind.read_per_s,
        decode_tokens_per_s=mac.write_per_s,
    )
    return WorkerReport(
        worker_id=mac.name, boot_id=str(mac.boot), url=f"http://{mac.name}", model=_MODEL,
        context_tokens=8192, lanes=(lane,), prefix_count=len(mac.kept),
        prefixes=tuple(map(str, islice(reversed(mac.kept), MAX_REPORTED_PREFIXES))),
    )  # fmt: skip


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
