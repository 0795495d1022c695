"""Account for every request once: counts into the store, figures into the meters, one log line."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from gateway.domain import Served
from gateway.keys.usage import Ledger
from gateway.metrics import Meters
from gateway.store import Key, Store
from gateway.trip import UNUSED
from policies.profile import Bypass

log = logging.getLogger(__name__)

_LATENCIES_KEPT = 1024
NOWHERE = "none"
"""The pool of a request that reached none."""


class Accounting:
    """The books of one gateway. `wall` is the time of the day."""

    def __init__(
        self, store: Store, meters: Meters, ledger: Ledger, wall: Callable[[], float]
    ) -> None:
        self._store = store
        self._meters = meters
        self._ledger = ledger
        self._wall = wall
        self._recent: dict[tuple[str, str], deque[float]] = {}

    def account(self, served: Served) -> None:
        """Enter one finished request; never waits and never fails a request."""
        self._store.count(tally(served))
        pool = served.candidate.pool if served.candidate else NOWHERE
        self._meters.request(served, pool)
        if served.spent.requests:
            self._ledger.enter(served.caller, served.usage, served.spent, self._wall())
        if served.outcome == "completed":
            self._keep(pool, "answer_s", served.seconds)
            if served.first_token_s is not None:
                self._keep(pool, "first_token_s", served.first_token_s)
        if served.added_s is not None:
            self._keep(pool, "added_s", served.added_s)
        log.info(
            "request.done request=%s key=%s outcome=%s status=%d code=%s pool=%s worker=%s "
            "reason=%s prefix=%s attempts=%d prompt_tokens=%d completion_tokens=%d seconds=%.3f",
            served.request_id,
            served.caller.key or "-",
            served.outcome,
            served.status,
            served.code or "-",
            pool,
            served.candidate.worker_id if served.candidate else "-",
            served.candidate.reason if served.candidate else "-",
            served.prefix,
            served.attempts,
            served.usage.prompt_tokens,
            served.usage.completion_tokens,
            served.seconds,
        )

    def latencies(self) -> dict[str, dict[str, dict[str, float]]]:
        """Tell, for each pool and figure, the median and the 95th percentile of recent requests."""
        figures: dict[str, dict[str, dict[str, float]]] = {}
        for (pool, figure), values in sorted(self._recent.items()):
            figures.setdefault(pool, {})[figure] = _percentiles(values)
        return figures

    def _keep(self, pool: str, figure: str, seconds: float) -> None:
        kept = self._recent.get((pool, figure))
        if kept is None:
            kept = self._recent[pool, figure] = deque(maxlen=_LATENCIES_KEPT)
        kept.append(seconds)


def tally(served: Served) -> dict[Key, int]:
    """List what one request adds to the counts."""
    counts: dict[Key, int] = {("outcomes", served.outcome.value): 1}
    if served.code:
        counts["errors", served.code] = 1
    if served.decision is not None and served.candidate is not None:
        chosen = served.candidate
        counts["decisions", chosen.pool, served.decision.route, chosen.reason] = 1
        for reason in served.decision.bypass:
            counts["bypass", reason.value] = 1
        if chosen.reason == Bypass.MTP_NOT_PAYING:  # of that worker, not of the request
            counts["bypass", chosen.reason] = 1
    if served.usage is not UNUSED:
        counts["prefix", served.prefix] = 1
    if served.attempts > 1:
        counts["retries",] = served.attempts - 1
    if served.inspected is not None:
        model = served.inspected.profile.model
        counts["tokens", model, "prompt"] = served.usage.prompt_tokens
        counts["tokens", model, "completion"] = served.usage.completion_tokens
        counts["tokens", model, "cached"] = served.usage.cached_tokens
    return counts


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))],
    }
