"""Account for every request once: a few additions when it ends, all else when a reader asks.

Requests with the same labels (route, reason, worker, outcome and so on) share one set of counters.
A flush, before counts are read or shared, turns these counters into totals; so the cost of a
request does not depend on how many totals it adds to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gateway.auth.usage_store import UsageStore
from gateway.errors import is_plain_name
from gateway.routing.prefix_affinity import ISOLATED
from gateway.state.counters import CounterKey
from gateway.state.recent_errors import MAX_TEXT_CHARS, ErrorRecord, RecentErrors
from gateway.telemetry import engine_counts
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.recent_usage import RecentUsage
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.stats import LaneKey, LaneStats, LaneTotals
from gateway.types import NOWHERE, UNUSED, Outcome
from paceline.request.profile import Bypass

# Some dozens are in use. A client that causes more only makes the counters flush earlier.
_LABELS_LIMIT = 2048
# Beyond it, requests count together: a worker may invent its id, its model and its lanes.
_LANES_LIMIT = 1024
_OTHER = "other"
_NO_CANDIDATE = (NOWHERE, "", "", "")
_NO_DECISION = ("", ())


class Accounting:
    """Counters of the requests of one gateway. `wall` returns the seconds since the epoch."""

    def __init__(
        self,
        usage_store: UsageStore,
        recent_errors: RecentErrors,
        access_log: AccessLog | None,
        wall: Callable[[], float],
    ) -> None:
        self._usage_store = usage_store
        self._recent_errors = recent_errors
        self._access_log = access_log
        self._wall = wall
        self.recent_usage = RecentUsage()
        self._counters: dict[tuple[Any, ...], _Counters] = {}
        self._lanes: dict[LaneKey, LaneStats] = {}
        self._totals: Counter[CounterKey] = Counter()
        self._pending: Counter[CounterKey] = Counter()

    def account(self, record: RequestRecord) -> None:
        """Count one finished request; never wait, and never raise an error."""
        candidate, decision, profile = record.candidate, record.decision, record.profile
        usage = record.usage
        # The fields of `_Labels`. A plain tuple: building a named one takes three times as long.
        key = (
            record.outcome,
            record.status,
            record.code,
            "" if usage is UNUSED else record.prefix,
            *(candidate[:4] if candidate else _NO_CANDIDATE),
            profile.model if candidate and profile else "",
            *(decision[:2] if decision else _NO_DECISION),
            record.engine,
        )
        counters = self._counters.get(key) or self._add_counters(key)
        counters.requests += 1
        counters.prompt_tokens += usage.prompt_tokens
        counters.completion_tokens += usage.completion_tokens
        counters.cached_tokens += usage.cached_tokens
        if record.attempts > 1:
            counters.more["retries",] += record.attempts - 1
            counters.more["failovers",] += record.failovers
        # A count of isolated ones would tell a client that another team has the same system prompt.
        if record.missed_reuse and record.missed_reuse != ISOLATED:
            counters.more["not_reused", record.missed_reuse] += 1
        if record.engine:
            _count_answer(counters.told, record)
        if counters.lane is not None:
            _observe(counters.lane, record)
        recent, caller = self.recent_usage.current, record.caller.key
        recent[caller, "requests"] += 1
        recent[caller, "tokens"] += usage.prompt_tokens + usage.completion_tokens
        if record.waited_s:
            recent[caller, "waited_ms"] += round(1000 * record.waited_s)
        if record.spent.requests:
            self._usage_store.add(record.caller, usage, record.spent, self._wall())
        if record.reason and record.outcome is not Outcome.RESENT:
            self._recent_errors.add(_error_record(record, self._wall()))
        if self._access_log is not None:
            self._access_log.write(record, self._wall())

    def take_pending(self) -> Mapping[CounterKey, int]:
        """Return the counts since the last call, for the store."""
        self._flush()
        pending, self._pending = self._pending, Counter()
        return pending

    def totals(self) -> Mapping[CounterKey, int]:
        """Return all counts since this gateway started."""
        self._flush()
        return self._totals

    def outcomes(self) -> Mapping[str, int]:
        """Return the requests since this gateway started by their outcome."""
        totals = self.totals()
        return {one.value: totals["outcomes", one.value] for one in Outcome}

    def lane_stats(self) -> Mapping[LaneKey, LaneStats]:
        """Return counters and histograms by lane."""
        self._flush()
        return self._lanes

    def lane_totals(self) -> dict[LaneKey, LaneTotals]:
        """Return a snapshot of the counters and histograms by lane."""
        return {key: lane.totals() for key, lane in self.lane_stats().items()}

    def _add_counters(self, key: tuple[Any, ...]) -> _Counters:
        if len(self._counters) >= _LABELS_LIMIT:
            self._flush()
        labels, lane = _Labels(*key), None
        if labels.pool != NOWHERE:
            lane_key = LaneKey(labels.pool, labels.lane, labels.worker_id, labels.model)
            if lane_key not in self._lanes and len(self._lanes) >= _LANES_LIMIT:
                labels = labels._replace(model=_OTHER)
                lane_key = LaneKey(labels.pool, _OTHER, _OTHER, _OTHER)
            lane = self._lanes.setdefault(lane_key, LaneStats())
        counters = self._counters[key] = _Counters(labels, lane)
        return counters

    def _flush(self) -> None:
        flushed, self._counters = self._counters, {}
        for counters in flushed.values():
            labels = counters.labels
            counts = _counts(counters)
            self._pending.update(counts)
            self._totals.update(counts)
            request_labels = (labels.pool, labels.reason or NOWHERE, str(labels.status))
            self._totals["requests", *request_labels] += counters.requests
            if counters.lane is not None:
                counters.lane.requests += counters.requests
                counters.lane.completion_tokens += counters.completion_tokens


class _Labels(NamedTuple):
    """The common properties of requests that share counters."""

    outcome: Outcome
    status: int
    code: str
    prefix: str
    """Empty if no worker reported usage."""
    pool: str
    """The first of the four fields that begin a `Candidate`; `NOWHERE` if no worker was reached."""
    lane: str
    worker_id: str
    reason: str
    model: str
    route: str
    """The first of the two fields that begin a `Decision`."""
    bypass: tuple[Bypass, ...]
    engine: str
    """Empty for a worker that sends its own counts."""

    @property
    def bypass_reasons(self) -> set[str]:
        """All reasons against drafts for these requests."""
        reasons = {reason.value for reason in self.bypass}
        if self.reason == Bypass.MTP_NOT_PAYING:  # a property of the worker, not of the request
            reasons.add(self.reason)
        return reasons


@dataclass(slots=True)
class _Counters:
    """Counters of requests with the same labels since the last flush."""

    labels: _Labels
    lane: LaneStats | None
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    more: Counter[CounterKey] = field(default_factory=Counter)
    """Counts that only some requests add."""
    told: Counter[str] = field(default_factory=Counter)
    """The numbers in the answers of an engine of another kind, and how many lacked them."""


def _error_record(record: RequestRecord, unix_s: float) -> ErrorRecord:
    """Describe a request that ended in an error."""
    model = record.profile.model if record.profile else ""
    return ErrorRecord(
        unix_s=unix_s,
        request_id=record.request_id,
        key=record.caller.key,
        # Without a worker, the name of the model may still be any text of the client.
        model=model if record.candidate or is_plain_name(model) else "",
        worker_id=record.candidate.worker_id if record.candidate else "",
        status=record.status,
        code=record.code,
        reason=record.reason[:MAX_TEXT_CHARS],
        address=record.address,
    )


def _observe(lane: LaneStats, record: RequestRecord) -> None:
    """Add the durations and drafts of one request."""
    if record.added_s is not None:
        lane.added_latency_s.add(record.added_s)
    if record.waited_s:
        lane.wait_s.add(record.waited_s)
    if record.first_token_s is not None:
        lane.first_token_s.add(record.first_token_s)
    if record.token_s is not None:
        lane.token_s.add(record.token_s)
    if record.outcome is Outcome.COMPLETED:
        lane.duration_s.add(record.seconds)
    if record.drafts is not None:
        lane.drafted += record.drafts.drafted
        lane.accepted += record.drafts.accepted


def _count_answer(told: Counter[str], record: RequestRecord) -> None:
    """Count the numbers in an engine's answer; without it nobody would count the drafts."""
    if record.outcome is Outcome.COMPLETED:
        told[engine_counts.UNTOLD_USAGE] += record.usage is UNUSED
        told[engine_counts.UNTOLD_CACHED] += record.usage is UNUSED or not record.usage.cached_known
        told[engine_counts.UNTOLD_DRAFTS] += record.drafts is None
    if record.drafts is not None:
        told[engine_counts.STEPS] += record.drafts.steps
        told[engine_counts.DRAFTED] += record.drafts.drafted
        told[engine_counts.ACCEPTED] += record.drafts.accepted
        for accepted, steps in enumerate(record.drafts.histogram):
            told[engine_counts.accepted_name(accepted)] += steps


def _counts(counters: _Counters) -> Counter[CounterKey]:
    """Return the additions of flushed counters to the counts of the fleet."""
    labels, requests, counts = counters.labels, counters.requests, +counters.more
    counts["outcomes", labels.outcome.value] = requests
    if labels.code and labels.outcome is not Outcome.RESENT:
        counts["errors", labels.code] = requests
    if labels.prefix:
        counts["prefix", labels.prefix] = requests
    if counters.lane is None:
        return counts
    counts["decisions", labels.pool, labels.route, labels.reason] = requests
    for reason in labels.bypass_reasons:
        counts["bypass", reason] = requests
    counts["tokens", labels.model, "prompt"] = counters.prompt_tokens
    counts["tokens", labels.model, "completion"] = counters.completion_tokens
    counts["tokens", labels.model, "cached"] = counters.cached_tokens
    if labels.engine:  # it sends no reports
        told = counters.told
        told[engine_counts.REQUESTS] = requests
        told[engine_counts.PROMPT] = counters.prompt_tokens
        told[engine_counts.COMPLETION] = counters.completion_tokens
        told[engine_counts.CACHED] = counters.cached_tokens
        if labels.prefix in engine_counts.RESULTS:
            told[labels.prefix] = requests
        place = (engine_counts.FAMILY, labels.worker_id, labels.model, labels.lane)
        counts.update({(*place, name): count for name, count in told.items() if count})
    return counts
