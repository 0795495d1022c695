"""Routing rules: ours, and those of other routers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from random import Random

from bench.fleet.world import Mac, SimulatedRequest
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S, WorkerRegistry
from gateway.fleet.worker import Lease
from gateway.routing.prefix_affinity import ExpectedReuse, PrefixIndex
from gateway.routing.prefix_keys import PrefixEnd, PrefixKeys
from gateway.routing.select import RoutingRequest, decide
from gateway.types import Usage
from paceline.protocol import MAX_REPORTED_PREFIXES, LaneReport, WorkerReport
from paceline.request.profile import Endpoint, RequestProfile
from policies.document import default_policy

_MODEL = "demo"
_CHARS_PER_TOKEN = 4
_SYNC_INTERVAL_S = 0.5
"""The interval of synchronisation between gateways."""


class Rule(ABC):
    """A routing rule. `record_sent` and `record_end` report the requests of the gateway itself."""

    name: str

    @abstractmethod
    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        """Return the index of a Mac; None queues the request until another one has ended."""

    def record_sent(self, request: SimulatedRequest, mac: Mac, now_s: float) -> None:
        """Record that the request was sent."""

    def record_end(self, request: SimulatedRequest, mac: Mac, cached_tokens: int | None) -> None:
        """Record the end of a request; `cached_tokens` is None after a failure."""


class RoundRobin(Rule):
    """Each Mac in rotation."""

    name = "round robin"

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        for _ in macs:
            self._next = (self._next + 1) % len(macs)
            if not macs[self._next].draining:
                break
        return self._next


class LeastLoad(Rule):
    """The Mac with the fewest requests per slot."""

    name = "least load"

    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        return min(_open(macs), key=lambda at: macs[at].in_flight / macs[at].kind.slots)


class BoundedHashing(Rule):
    """Consistent hashing, bounded to 1.25 of the mean load (Mirrokni, 2016).

    It hashes the system prompt, or the session, as if clients named theirs.
    """

    name = "hashing, bounded loads"
    _POINTS = 64

    def __init__(self, macs: int) -> None:
        points = [(_hash(f"{mac}:{n}"), mac) for mac in range(macs) for n in range(self._POINTS)]
        self._ring = sorted(points)

    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        bound = 1.25 * (sum(mac.in_flight for mac in macs) + 1) / len(macs)
        name = request.ends[0].key if request.session < 0 else f"session {request.session}"
        start = bisect(self._ring, (_hash(f"prompt {name}"), 0))
        for step in range(len(self._ring)):
            _, at = self._ring[(start + step) % len(self._ring)]
            if macs[at].in_flight + 1 <= max(bound, 1) and not macs[at].draining:
                return at
        return min(_open(macs), key=lambda at: macs[at].in_flight)


class CacheAware(Rule):
    """SGLang's router: the longest match, unless loads differ by more than its thresholds.

    Its default threshold is a difference of 64 requests; here it is one lane, which suits fleets of
    this size better. Its tree keeps prefixes that a worker has evicted.
    """

    name = "SGLang's cache-aware rule"
    _MATCH, _RELATIVE = 0.3, 1.5

    def __init__(self) -> None:
        self._counts_by_key: dict[int, Counter[int]] = defaultdict(Counter)
        self._tokens_by_mac: Counter[int] = Counter()

    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        loads = {at: macs[at].in_flight for at in _open(macs)}
        maximum, minimum = max(loads.values()), min(loads.values())
        if maximum - minimum > macs[0].kind.slots and maximum > self._RELATIVE * minimum:
            return min(loads, key=lambda at: loads[at])
        for end in reversed(request.ends):
            counts = [at for at in self._counts_by_key.get(end.key, ()) if at in loads]
            if counts:
                if end.tokens <= self._MATCH * request.prompt_tokens:
                    break
                return min(counts, key=lambda at: loads[at])
        return min(loads, key=lambda at: self._tokens_by_mac[at])

    def record_sent(self, request: SimulatedRequest, mac: Mac, now_s: float) -> None:
        at, begin = int(mac.name), 0
        for end in (*request.ends, *([request.end] if request.own else ())):
            if not self._counts_by_key[end.key][at]:
                self._tokens_by_mac[at] += end.tokens - begin
            self._counts_by_key[end.key][at] += 1
            begin = end.tokens


class Oracle(Rule):
    """A rule that reads cache, queue and speed of all Macs; it minimises time to first token."""

    name = "oracle"

    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        return min(_open(macs), key=lambda at: self._first_s(request, macs[at]))

    def _first_s(self, request: SimulatedRequest, mac: Mac) -> float:
        coming = {end.key for row in (*mac.reading, *mac.waiting) for end in row.request.ends}
        prompt_tokens = request.prompt_tokens - mac.cached_tokens(request, coming)
        pending_tokens = mac.pending_prefill_tokens
        wait_s = 0.0
        if mac.in_flight >= mac.kind.slots:
            remaining = sorted(row.write_left for row in mac.writing) or [100.0]
            queue_index = min(len(mac.waiting), len(remaining) - 1)
            wait_s = remaining[queue_index] * mac.kind.step_s * 2
        return wait_s + mac.read_time_s(pending_tokens + prompt_tokens)


class Ours(Rule):
    """`decide`, registry and prefix index of the gateway; requests without a slot wait in it.

    Its state of the Macs comes from its own requests and from heartbeats. Several gateways receive
    the traffic alternately and exchange claims and heartbeats with a delay of half a second.
    """

    name = "paceline"

    def __init__(self, gateways: int, rng: Random) -> None:
        self._now_s = 0.0
        self._rng = rng
        self._policy = default_policy()
        self._fleets = [WorkerRegistry(lambda: self._now_s, rng.random) for _ in range(gateways)]
        self._prefixes = [PrefixIndex(lambda: self._now_s) for _ in range(gateways)]
        self._leases: dict[int, Lease] = {}
        self._expected: dict[int, ExpectedReuse] = {}
        self._heartbeats_s: dict[tuple[str, int, bool], float] = {}
        """The time of the last heartbeat of each boot of a Mac."""
        self._exchanged_s = 0.0

    def choose(self, request: SimulatedRequest, macs: Sequence[Mac], now_s: float) -> int | None:
        self._now_s = now_s
        self._synchronise(macs)
        fleet = self._fleets[request.number % len(self._fleets)]
        prefixes = self._prefixes[request.number % len(self._fleets)]
        profile = _profile(request)
        routing_request = RoutingRequest(self._policy, profile, prefix=_prefix_keys(request))
        for first_only in (True, False):
            cached = prefixes.cached(routing_request.prefix)
            decision = decide(
                routing_request, fleet.view(), now_s, self._rng, cached, first_only=first_only
            )
            for candidate in decision.candidates:
                if (lease := fleet.acquire(candidate)) is not None:
                    self._leases[request.number] = lease
                    return int(candidate.worker_id)
            if decision.complete:
                break
        return None

    def record_sent(self, request: SimulatedRequest, mac: Mac, now_s: float) -> None:
        self._now_s = now_s
        boot = self._leases[request.number].boot
        prefixes = self._prefixes[request.number % len(self._fleets)]
        expected = prefixes.record_dispatch(_prefix_keys(request), boot, self._policy.prefix)
        self._expected[request.number] = expected

    def record_end(self, request: SimulatedRequest, mac: Mac, cached_tokens: int | None) -> None:
        self._now_s = max(self._now_s, mac.now_s)
        lease = self._leases.pop(request.number)
        fleet = self._fleets[request.number % len(self._fleets)]
        prefixes = self._prefixes[request.number % len(self._fleets)]
        failed = cached_tokens is None
        fleet.release(lease, AttemptResult.FAILED if failed else AttemptResult.SUCCEEDED)
        usage = None if failed else Usage(request.prompt_tokens, 1, cached_tokens or 0)
        expected = self._expected.pop(request.number)
        prefixes.record_usage(_prefix_keys(request), lease.boot, usage, expected)

    def _synchronise(self, macs: Sequence[Mac]) -> None:
        """Receive the heartbeats that are due, and the claims of other gateways."""
        for mac in macs:
            # A worker that drains says so at once.
            boot = mac.name, mac.boot, mac.draining
            if (
                self._heartbeats_s.get(boot, -HEARTBEAT_INTERVAL_S) + HEARTBEAT_INTERVAL_S
                <= self._now_s
            ):
                self._heartbeats_s[boot] = self._now_s
                first, *other_fleets = self._fleets
                report = _worker_report(mac)
                first.heartbeat(report)
                for fleet in other_fleets:
                    fleet.merge_remote(report, _SYNC_INTERVAL_S)
                for prefixes in self._prefixes:
                    prefixes.record_report(report)
        if self._exchanged_s + _SYNC_INTERVAL_S <= self._now_s:
            self._exchanged_s = self._now_s
            pending_claims = [prefixes.take_pending() for prefixes in self._prefixes]
            for sender, claims in enumerate(pending_claims):
                for at, prefixes in enumerate(self._prefixes):
                    for claim in claims if at != sender else ():
                        prefixes.merge(claim, _SYNC_INTERVAL_S)


def _profile(request: SimulatedRequest) -> RequestProfile:
    chars = _CHARS_PER_TOKEN * request.prompt_tokens
    return RequestProfile(endpoint=Endpoint.CHAT, model=_MODEL, text_chars=chars)


def _prefix_keys(request: SimulatedRequest) -> PrefixKeys:
    """Return the keys of a prompt: of its system prompt, and of each message after it."""
    system, *turns = request.ends
    found = [PrefixEnd(_key(system.key), _CHARS_PER_TOKEN * system.tokens, 1)]
    for turn in turns:
        messages = len(found) + 1
        found.append(PrefixEnd(_key(turn.key), _CHARS_PER_TOKEN * turn.prompt_tokens, messages))
        answer = PrefixEnd(_key(-turn.key), _CHARS_PER_TOKEN * turn.tokens, messages + 1)
        found.append(answer)
    if request.own:
        size = _CHARS_PER_TOKEN * request.prompt_tokens
        found.append(PrefixEnd(_key(request.own), size, len(found) + 1))
    return PrefixKeys((*reversed(found),), has_system=True, unscoped=found[0].key)


@lru_cache(100_000)
def _key(number: int) -> bytes:
    return _hash(f"prompt {number}").to_bytes(8)


def _open(macs: Sequence[Mac]) -> list[int]:
    """Return the indexes of the Macs that take requests; of all, if none does."""
    return [at for at, mac in enumerate(macs) if not mac.draining] or [*range(len(macs))]


def _worker_report(mac: Mac) -> WorkerReport:
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
        context_tokens=131_072, lanes=(lane,), prefix_count=len(mac.cached),
        draining=mac.draining,
        prefixes=tuple(
            _key(key).hex() for key in islice(reversed(mac.cached), MAX_REPORTED_PREFIXES)
        ),
        evicted_prefixes=tuple(_key(key).hex() for key in mac.evicted),
    )  # fmt: skip


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
