"""Account for every request once: a few additions while it ends, the rest when somebody reads.

Requests of one kind (the same route, reason, worker, outcome and so on) add to one sheet. What a
sheet means for all the counts is worked out when the books are settled, which is before they are
read or shared: so thousands of requests cost what one does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gateway.auth.usage import UsageLedger
from gateway.storage.counters import CounterKey, CounterStore
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.stats import Figures, Place, Sums
from gateway.types import NOWHERE, UNUSED, Drafts, Outcome
from policies.request.profile import Bypass

# Kinds of requests in use are some dozens. Who makes up more (which takes strange requests) makes
# the books settle early, and nothing else.
_SHEETS_KEPT = 2048


class _Kind(NamedTuple):
    """What requests of one sheet have in common."""

    outcome: Outcome
    status: int
    code: str
    prefix: str
    """Empty where no worker has counted the request."""
    place: Place | None
    route: str
    reason: str
    bypass: tuple[Bypass, ...]


class _Sheet:
    """What requests of one kind have added up to since the books were settled."""

    __slots__ = (
        *("accepted", "cached_tokens", "completion_tokens", "drafted", "drafts", "histogram"),
        *("prompt_tokens", "requests", "retries", "sums"),
    )

    def __init__(self, sums: Sums | None) -> None:
        self.sums = sums
        self.clear()

    def clear(self) -> None:
        self.requests = self.retries = 0
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.drafts = self.drafted = self.accepted = 0
        self.histogram: Counter[int] = Counter()

    def draft(self, drafts: Drafts) -> None:
        """Add what drafting did for one request."""
        self.drafts += drafts.steps
        self.drafted += drafts.drafted
        self.accepted += drafts.accepted
        for accepted, steps in enumerate(drafts.histogram):
            self.histogram[accepted] += steps


class Accounting:
    """The books of one gateway. `wall` is the time of the day."""

    def __init__(
        self,
        store: CounterStore,
        ledger: UsageLedger,
        access_log: AccessLog | None,
        wall: Callable[[], float],
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._access_log = access_log
        self._wall = wall
        self._sheets: dict[tuple[object, ...], _Sheet] = {}
        self._places: dict[Place, Sums] = {}
        self._totals: Counter[CounterKey] = Counter()
        store.owing = self.settle

    def account(self, served: RequestRecord) -> None:
        """Enter one finished request; never waits and never fails a request."""
        usage, candidate, decision = served.usage, served.candidate, served.decision
        counted = usage is not UNUSED
        place = None
        if candidate is not None and served.inspected is not None:
            model = served.inspected.profile.model
            place = (candidate.pool, candidate.lane, candidate.worker_id, model)
        kind = (
            served.outcome,
            served.status,
            served.code,
            served.prefix if counted else "",
            place,
            decision.route if decision is not None else "",
            candidate.reason if candidate is not None else "",
            decision.bypass if decision is not None else (),
        )
        sheet = self._sheets.get(kind)
        if sheet is None:
            sheet = self._begin(kind, place)
        sheet.requests += 1
        if counted:
            sheet.prompt_tokens += usage.prompt_tokens
            sheet.completion_tokens += usage.completion_tokens
            sheet.cached_tokens += usage.cached_tokens
        if served.drafts is not None:
            sheet.draft(served.drafts)
        if served.attempts > 1:
            sheet.retries += served.attempts - 1
        if sheet.sums is not None:
            _time(sheet.sums, served)
        if served.spent.requests:
            self._ledger.add(served.caller, usage, served.spent, self._wall())
        if self._access_log is not None:
            self._access_log.write(served, self._wall())

    def settle(self) -> None:
        """Work out what the sheets add to the counts."""
        for written, sheet in self._sheets.items():
            if sheet.requests:
                kind = _Kind(*written)  # type: ignore[arg-type]  # as `account` has written it
                tally = _tally(kind, sheet)
                self._store.add(tally)
                self._totals.update(tally)
                self._totals["requests", *_request_labels(kind)] += sheet.requests
                _add_up(sheet, kind)
                sheet.clear()

    def totals(self) -> Mapping[CounterKey, int]:
        """Read what this gateway has counted in its life."""
        self.settle()
        return self._totals

    def places(self) -> Mapping[Place, Sums]:
        """Read what requests have added up to, by the place where they ran."""
        self.settle()
        return self._places

    def figures(self) -> dict[Place, Figures]:
        """Take a snapshot of all places."""
        return {place: sums.frozen() for place, sums in self.places().items()}

    def _begin(self, kind: tuple[object, ...], place: tuple[str, ...] | None) -> _Sheet:
        if len(self._sheets) >= _SHEETS_KEPT:
            self.settle()
            self._sheets.clear()
        sums = None
        if place is not None:
            sums = self._places.setdefault(Place(*place), Sums())
        sheet = self._sheets[kind] = _Sheet(sums)
        return sheet


def _time(sums: Sums, served: RequestRecord) -> None:
    """Enter how long a request took, part by part."""
    if served.added_s is not None:
        sums.added_s.add(served.added_s)
    if served.waited_s:
        sums.wait_s.add(served.waited_s)
    if served.first_token_s is not None:
        sums.first_token_s.add(served.first_token_s)
    if served.token_s is not None:
        sums.token_s.add(served.token_s)
    if served.outcome is Outcome.COMPLETED:
        sums.answer_s.add(served.seconds)


def _add_up(sheet: _Sheet, kind: _Kind) -> None:
    sums = sheet.sums
    if sums is None:
        return
    sums.requests += sheet.requests
    if kind.outcome is Outcome.FAILED:
        sums.failed += sheet.requests
    sums.prompt_tokens += sheet.prompt_tokens
    sums.completion_tokens += sheet.completion_tokens
    sums.cached_tokens += sheet.cached_tokens
    sums.drafts += sheet.drafts
    sums.drafted += sheet.drafted
    sums.accepted += sheet.accepted
    sums.histogram.update(sheet.histogram)
    sums.reasons[kind.reason] += sheet.requests
    for reason in _kept_out(kind):
        sums.bypass[reason] += sheet.requests
    if kind.prefix:
        sums.prefix[kind.prefix] += sheet.requests


def _tally(kind: _Kind, sheet: _Sheet) -> dict[CounterKey, int]:
    """List what the requests of a sheet add to the counts."""
    requests = sheet.requests
    counts: dict[CounterKey, int] = {("outcomes", kind.outcome.value): requests}
    if kind.code:
        counts["errors", kind.code] = requests
    if kind.place is not None:
        pool, _, _, model = kind.place
        counts["decisions", pool, kind.route, kind.reason] = requests
        for reason in _kept_out(kind):
            counts["bypass", reason] = requests
        counts["tokens", model, "prompt"] = sheet.prompt_tokens
        counts["tokens", model, "completion"] = sheet.completion_tokens
        counts["tokens", model, "cached"] = sheet.cached_tokens
    if kind.prefix:
        counts["prefix", kind.prefix] = requests
    if sheet.retries:
        counts["retries",] = sheet.retries
    return counts


def _kept_out(kind: _Kind) -> set[str]:
    """Name every reason that kept requests of a kind from being drafted for."""
    reasons = {reason.value for reason in kind.bypass}
    if kind.reason == Bypass.MTP_NOT_PAYING:  # of that worker, not of the request
        reasons.add(kind.reason)
    return reasons


def _request_labels(kind: _Kind) -> tuple[str, str, str]:
    pool = NOWHERE if kind.place is None else kind.place[0]
    return pool, kind.reason or NOWHERE, str(kind.status)
