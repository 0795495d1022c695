"""Prefix affinity: keys of system prompts, and which workers have them cached.

A worker caches the system prompts that it has computed and answers the next request with one much
sooner. What is cached where is a claim: made when a request is sent, confirmed or dropped by the
`cached_tokens` of its response and by the worker's reports, and void after the worker's boot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from pydantic_core import to_json

from gateway.routing.view import FleetView
from gateway.types import Caller, Inspected, Usage, WorkerBoot
from policies.sections import PrefixPolicy
from workers.protocol import WorkerReport

MAX_PREFIXES = 10_000
MAX_PENDING_CLAIMS = 2_000
# The prefill of a shorter prompt takes hardly longer than a cache lookup.
_MIN_PREFIX_BYTES = 256
_MAX_REPORTED_BOOTS = 256
_NO_KEYS: frozenset[str] = frozenset()
_SYSTEM_FIELDS = ("tools", "chat_template_kwargs", "reasoning_effort")


class PrefixHasher:
    """Derives keys of system prompts by a keyed digest that reveals nothing of the text."""

    def __init__(self, secret: bytes) -> None:
        self._digest = blake2b(key=blake2b(secret, person=b"paceline-prefix").digest(),
                              digest_size=16)  # fmt: skip

    def prefix_key(self, inspected: Inspected, caller: Caller, rules: PrefixPolicy) -> str:
        """Return the key of the prefix that requests may share; empty if it is too short."""
        body = inspected.body
        messages = body.get("messages")
        if not messages:
            return ""
        first = messages[0]
        system = first.get("content") if first["role"] == "system" else None
        shared = [body.get(field) for field in _SYSTEM_FIELDS]
        if system is None and shared[0] is None:
            return ""
        scope = rules.scope(caller.key, caller.team)
        prefix = to_json([scope, inspected.profile.model, *shared, system], inf_nan_mode="null")
        if len(prefix) < _MIN_PREFIX_BYTES:
            return ""
        return self._hex(prefix)

    def cache_salt(self, caller: Caller, rules: PrefixPolicy) -> str:
        """Return the salt of a client's isolation scope; empty if all clients share prompts."""
        scope = rules.scope(caller.key, caller.team)
        return self._hex(f"cache_salt {scope}".encode()) if scope else ""

    def _hex(self, text: bytes) -> str:
        digest = self._digest.copy()
        digest.update(text)
        return digest.hexdigest()


class PrefixClaim(NamedTuple):
    """A claim as gateways exchange it; a `ttl_s` of 0 withdraws it."""

    prefix_key: str
    worker_id: str
    boot_id: str
    ttl_s: float


class PrefixIndex:
    """Claims of workers to system prompts. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claims: OrderedDict[str, dict[WorkerBoot, float]] = OrderedDict()
        """Time at which each claim ends, by prefix key; the last one used is last."""
        self._tokens: dict[str, int] = {}
        """Cached tokens of a prompt, as the last worker counted them."""
        self._rules = PrefixPolicy()
        """Rules of the policy of the last request."""
        self._reported: OrderedDict[WorkerBoot, frozenset[str]] = OrderedDict()
        """Prefix keys in the last report of each boot."""
        self._pending: dict[tuple[str, str, str], PrefixClaim] = {}
        self.mispredicted = 0
        """Claims that a response without cached tokens has shown to be wrong."""

    def __len__(self) -> int:
        """Return the number of system prompts with claims."""
        return len(self._claims)

    def annotate(self, fleet: FleetView, key: str) -> FleetView:
        """Return a snapshot with the boots that have a system prompt cached."""
        claims = self._claims.get(key)
        if not claims:
            return fleet
        now_s = self._clock()
        boots = frozenset([boot for boot, until_s in claims.items() if until_s > now_s])
        return fleet.with_prefix(boots, self._tokens.get(key, 0))

    def record_dispatch(self, key: str, boot: WorkerBoot, rules: PrefixPolicy) -> None:
        """Claim a system prompt for the worker that is about to compute it."""
        self._rules = rules
        if not rules.max_workers:
            self._claims.pop(key, None)
            self._tokens.pop(key, None)
            return
        self._claim(key, boot, rules.ttl_s)
        claims = self._claims[key]
        while len(claims) > rules.max_workers:
            del claims[next(iter(claims))]
        self._publish(PrefixClaim(key, *boot, rules.ttl_s))

    def record_usage(
        self, key: str, boot: WorkerBoot, usage: Usage | None, *, expected: bool
    ) -> None:
        """Confirm or drop a claim by the usage of a response, None without one.

        `expected`: the request was sent to this worker for its cache.
        """
        if usage is None:
            wrong = not expected  # the worker may not have computed it
        else:
            wrong = expected and not usage.cached_tokens
            self.mispredicted += wrong
            if usage.cached_tokens and key in self._claims:
                self._tokens[key] = usage.cached_tokens
        if wrong:
            self._drop(key, boot)
            self._publish(PrefixClaim(key, *boot, 0.0))

    def record_report(self, report: WorkerReport) -> None:
        """Add and drop claims by what a worker has cached and evicted since its last report.

        All gateways receive each report, so these claims are not exchanged.
        """
        boot = (report.worker_id, report.boot_id)
        before, now = self._reported.get(boot, _NO_KEYS), frozenset(report.prefixes)
        if now == before or not self._rules.max_workers:
            return
        for key in now - before:
            self._claim(key, boot, self._rules.ttl_s)
        if report.prefix_count == len(now):
            for key in before - now:
                self._drop(key, boot)
        self._reported[boot] = now
        self._reported.move_to_end(boot)
        if len(self._reported) > _MAX_REPORTED_BOOTS:
            self._reported.popitem(last=False)

    def take_pending(self) -> tuple[PrefixClaim, ...]:
        """Return the latest claims that other gateways have not received."""
        pending, self._pending = tuple(self._pending.values()), {}
        return pending

    def merge(self, claim: PrefixClaim, age_s: float) -> None:
        """Apply a claim that another gateway made `age_s` ago."""
        boot = (claim.worker_id, claim.boot_id)
        if claim.ttl_s > age_s:
            self._claim(claim.prefix_key, boot, claim.ttl_s - age_s)
        elif not claim.ttl_s:
            self._drop(claim.prefix_key, boot)

    def _publish(self, claim: PrefixClaim) -> None:
        key = claim[:3]
        self._pending.pop(key, None)
        self._pending[key] = claim
        if len(self._pending) > MAX_PENDING_CLAIMS:  # no exchange takes place
            del self._pending[next(iter(self._pending))]

    def _claim(self, key: str, boot: WorkerBoot, for_s: float) -> None:
        claims = self._claims.setdefault(key, {})
        self._claims.move_to_end(key)
        claims.pop(boot, None)
        claims[boot] = self._clock() + for_s
        if len(self._claims) > MAX_PREFIXES:
            self._tokens.pop(self._claims.popitem(last=False)[0], None)

    def _drop(self, key: str, boot: WorkerBoot) -> None:
        claims = self._claims.get(key)
        if claims is None:
            return
        claims.pop(boot, None)
        if not claims:
            del self._claims[key]
            self._tokens.pop(key, None)
