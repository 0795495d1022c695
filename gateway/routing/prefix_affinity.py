"""System prompts: the name of each, and which workers hold it as far as this gateway knows.

A worker that has read a system prompt keeps what it computed and answers the next request with the
same one much sooner. Who holds what is a claim: made when a request is sent, confirmed or dropped
by the `cached_tokens` of its answer and by the worker's reports, and gone with its life.
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
# Reading less takes a worker hardly longer than looking for it.
_SHORTEST_BYTES = 256
_BOOTS_KEPT = 256
_NOTHING: frozenset[str] = frozenset()
_SYSTEM_FIELDS = ("tools", "chat_template_kwargs")


class PrefixHasher:
    """Names system prompts by a keyed digest, so that a name says nothing of the words."""

    def __init__(self, secret: bytes) -> None:
        self._begun = blake2b(key=blake2b(secret, person=b"paceline-prefix").digest(),
                              digest_size=16)  # fmt: skip

    def prefix_key(self, inspected: Inspected, caller: Caller, rules: PrefixPolicy) -> str:
        """Name what a request shares with others; empty where that is too little to look for."""
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
        written = to_json([scope, inspected.profile.model, *shared, system], inf_nan_mode="null")
        if len(written) < _SHORTEST_BYTES:
            return ""
        digest = self._begun.copy()
        digest.update(written)
        return digest.hexdigest()


class PrefixClaim(NamedTuple):
    """What gateways tell each other: who holds a system prompt for how long; 0 is not at all."""

    prefix_key: str
    worker_id: str
    boot_id: str
    ttl_s: float


class PrefixIndex:
    """Who holds which system prompt. `clock` is monotonic and in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claims: OrderedDict[str, dict[WorkerBoot, float]] = OrderedDict()
        """Until when, the last one used at the end."""
        self._tokens: dict[str, int] = {}
        """What a worker that holds one need not read, as far as one has counted it here."""
        self._rules = PrefixPolicy()
        """Those of the last request."""
        self._announced: OrderedDict[WorkerBoot, frozenset[str]] = OrderedDict()
        """What workers told that they hold, by their last reports."""
        self._news: dict[tuple[str, str, str], PrefixClaim] = {}
        self.mispredicted = 0
        """Claims that a worker's own count has shown to be wrong."""

    def __len__(self) -> int:
        """Count the system prompts that are known."""
        return len(self._claims)

    def annotate(self, fleet: FleetView, name: str) -> FleetView:
        """Mark in a snapshot who holds a system prompt now."""
        claims = self._claims.get(name)
        if not claims:
            return fleet
        now_s = self._clock()
        holders = frozenset([holding for holding, until_s in claims.items() if until_s > now_s])
        return fleet.with_prefix(holders, self._tokens.get(name, 0))

    def record_dispatch(self, name: str, holding: WorkerBoot, rules: PrefixPolicy) -> None:
        """Learn that a worker is about to read it: who asks next is to find it there."""
        self._rules = rules
        if not rules.max_workers:
            self._claims.pop(name, None)
            self._tokens.pop(name, None)
            return
        self._keep(name, holding, rules.ttl_s)
        claims = self._claims[name]
        while len(claims) > rules.max_workers:
            del claims[next(iter(claims))]
        self._tell(PrefixClaim(name, *holding, rules.ttl_s))

    def record_usage(
        self, name: str, holding: WorkerBoot, usage: Usage | None, *, expected: bool
    ) -> None:
        """Learn from how a request ended whether the worker holds it; `usage` is its own count.

        `expected` says that it was sent there for that.
        """
        if usage is None:
            untrue = not expected  # perhaps it was never read
        else:
            untrue = expected and not usage.cached_tokens
            self.mispredicted += untrue
            if usage.cached_tokens and name in self._claims:
                self._tokens[name] = usage.cached_tokens
        if untrue:
            self._drop(name, holding)
            self._tell(PrefixClaim(name, *holding, 0.0))

    def record_report(self, report: WorkerReport) -> None:
        """Learn from a worker's report what it has stored and evicted since the one before.

        All gateways hear the report, so none needs to tell.
        """
        holding = (report.worker_id, report.boot_id)
        before, now = self._announced.get(holding, _NOTHING), frozenset(report.prefixes)
        if now == before or not self._rules.max_workers:
            return
        for name in now - before:
            self._keep(name, holding, self._rules.ttl_s)
        if report.prefix_count == len(now):
            for name in before - now:
                self._drop(name, holding)
        self._announced[holding] = now
        self._announced.move_to_end(holding)
        if len(self._announced) > _BOOTS_KEPT:
            self._announced.popitem(last=False)

    def take_pending(self) -> tuple[PrefixClaim, ...]:
        """Give what other gateways should hear, each claim once, as it is now."""
        news, self._news = tuple(self._news.values()), {}
        return news

    def merge(self, claim: PrefixClaim, age_s: float) -> None:
        """Take in what another gateway claimed so long ago."""
        holding = (claim.worker_id, claim.boot_id)
        if claim.ttl_s > age_s:
            self._keep(claim.prefix_key, holding, claim.ttl_s - age_s)
        elif not claim.ttl_s:
            self._drop(claim.prefix_key, holding)

    def _tell(self, claim: PrefixClaim) -> None:
        about = claim[:3]
        self._news.pop(about, None)
        self._news[about] = claim
        if len(self._news) > MAX_PENDING_CLAIMS:  # nobody hears them just now
            del self._news[next(iter(self._news))]

    def _keep(self, name: str, holding: WorkerBoot, for_s: float) -> None:
        claims = self._claims.setdefault(name, {})
        self._claims.move_to_end(name)
        claims.pop(holding, None)
        claims[holding] = self._clock() + for_s
        if len(self._claims) > MAX_PREFIXES:
            self._tokens.pop(self._claims.popitem(last=False)[0], None)

    def _drop(self, name: str, holding: WorkerBoot) -> None:
        claims = self._claims.get(name)
        if claims is None:
            return
        claims.pop(holding, None)
        if not claims:
            del self._claims[name]
            self._tokens.pop(name, None)
