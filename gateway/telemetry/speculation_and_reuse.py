"""An alarm for the promise that one request drafts and reuses earlier tokens at once.

Engines have lost one of the two unseen, because each of them alone still works. So the requests
that could have both are counted by what they had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gateway.routing.select import ELIGIBLE
from gateway.telemetry.request_record import RequestRecord
from gateway.telemetry.stats import LaneKey, LaneTotals, Snapshot, SnapshotHistory
from gateway.types import Outcome

WINDOW_S = 600.0
BOTH, DRAFTED, REUSED, NEITHER = "both", "drafted_only", "reused_only", "neither"
RESULTS = (BOTH, DRAFTED, REUSED, NEITHER)
# Fewer requests of one kind and none with both may be chance.
_ENOUGH_REQUESTS = 3
# A shorter prefix is not always cached, and a shorter answer has no drafts.
_MIN_CACHED_TOKENS = 256
_MIN_ANSWER_TOKENS = 8


class Alarm(NamedTuple):
    """What the requests of one window had that could draft and reuse at once."""

    counts: Mapping[str, int]
    """Requests by result."""
    problem: str
    """Which worker lost one of the two, in a sentence; empty if none did."""


def result_of(record: RequestRecord) -> str:
    """Return what a request had that could draft and reuse; empty if it could not do both."""
    candidate, usage = record.candidate, record.usage
    if (
        candidate is None
        or candidate.cached_tokens < _MIN_CACHED_TOKENS
        or candidate.reason != ELIGIBLE
        or record.outcome is not Outcome.COMPLETED
        or usage.completion_tokens < _MIN_ANSWER_TOKENS
        or not usage.cached_known
        or record.drafts is None
        or (record.profile is not None and record.profile.draft_tokens == 0)
    ):
        return ""
    drafted, reused = record.drafts.drafted > 0, usage.cached_tokens > 0
    if drafted and reused:
        return BOTH
    if drafted:
        return DRAFTED
    return REUSED if reused else NEITHER


def alarm_of(history: SnapshotHistory, now: Snapshot) -> Alarm:
    """Return the counts of the window up to now, and the first lane that lost one of the two."""
    lanes = now.minus(history.window(now, WINDOW_S)[0])
    counts = Counter[str]()
    for totals in lanes.values():
        counts.update(totals.speculation_and_reuse)
    found = {result: counts[result] for result in RESULTS}
    return Alarm(found, next(_problems(lanes), ""))


def _problems(lanes: Mapping[LaneKey, LaneTotals]) -> Iterator[str]:
    for key, totals in lanes.items():
        counts = totals.speculation_and_reuse
        if counts.get(BOTH, 0):
            continue
        for result, had, lacked in (
            (DRAFTED, "drafted", "reused earlier tokens"),
            (REUSED, "reused earlier tokens", "drafted"),
        ):
            if (count := counts.get(result, 0)) >= _ENOUGH_REQUESTS:
                yield (
                    f"On the worker {key.worker_id}, {count} requests of the last "
                    f"{WINDOW_S / 60:.0f} minutes {had} and none {lacked}, though they could have "
                    "done both."
                )
