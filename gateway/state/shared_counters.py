"""The counters of all gateways, exchanged over Redis and read from memory.

A gateway process only ever writes its own totals, complete, under an id of its own. So a repeated
write counts once, the next write makes up for a failed one, and the sum is over processes. The
totals of processes that ended are folded into one sum.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from gateway.state.counters import CounterKey, MemoryCounters, TakePending
from gateway.state.redis import RedisClient
from gateway.state.shared_hash import SharedHash
from gateway.state.worker_reports import SharedWorkerReports
from paceline.protocol import WorkerReport

_SUM = "earlier"
_FOLD_AFTER_MS = 3_600_000
_TOMBSTONE_S = 30 * 86_400


class _Totals(NamedTuple):
    """The totals of one process, and the time of its last write by the clock of Redis."""

    updated_ms: int
    totals: Mapping[CounterKey, int]


class SharedCounters:
    """The counters that gateways share. Only one task calls `exchange`."""

    def __init__(
        self, redis: RedisClient, reports: SharedWorkerReports, take_pending: TakePending = dict
    ) -> None:
        self._reports = reports
        self._shared = SharedHash(redis, "counters", "totals", _parse)
        self._take_pending = take_pending
        self._id = secrets.token_hex(8)
        self._own: Counter[CounterKey] = Counter()

    async def counts(self) -> Mapping[CounterKey, int]:
        """Return all counters; those of other gateways as of the last exchange."""
        self._own.update(self._take_pending())
        counts = Counter(self._own)
        for process, one in self._shared.values.items():
            if process != self._id:
                counts.update(one.totals)
        return counts

    async def store_report(self, report: WorkerReport) -> None:
        """Store a report unless a later one of that boot is stored."""
        self._reports.store(report)

    async def reports(self) -> tuple[WorkerReport, ...]:
        """Return the last report of every boot, also of workers that are gone."""
        return self._reports.reports()

    async def exchange(self) -> None:
        """Read the totals of other processes, and write those of this one."""
        self._own.update(self._take_pending())
        now_ms = (await self._shared.read()).now_ms
        refused = await self._shared.write({self._id: _text(now_ms, self._own)})
        if folded := refused.get(self._id):
            # Folded while Redis was unreachable: continue under another id, without those totals.
            self._own.subtract(_parse(folded).totals)
            self._own = +self._own
            self._id = secrets.token_hex(8)
        else:
            await self._fold_one(now_ms)

    async def _fold_one(self, now_ms: int) -> None:
        """Fold the totals of one process that has written nothing for an hour."""
        values = self._shared.values
        for process, one in values.items():
            if process not in (_SUM, self._id) and now_ms - one.updated_ms > _FOLD_AFTER_MS:
                summed = Counter(one.totals)
                if earlier := values.get(_SUM):
                    summed.update(earlier.totals)
                tombstone = _text(one.updated_ms, one.totals)
                await self._shared.fold(
                    process, _SUM, _text(0, summed), tombstone=tombstone, keep_s=_TOMBSTONE_S
                )
                return


CounterStore = MemoryCounters | SharedCounters
"""Counters, which only grow, and reports, which later ones of the boot replace."""


def _text(updated_ms: int, totals: Mapping[CounterKey, int]) -> str:
    pairs = [[list(key), amount] for key, amount in totals.items()]
    return json.dumps({"updated_ms": updated_ms, "totals": pairs}, separators=(",", ":"))


def _parse(text: str) -> _Totals:
    """Parse the totals of a process; raise `ValueError`."""
    try:
        value = json.loads(text)
        totals = {tuple(key): int(amount) for key, amount in value["totals"]}
        return _Totals(int(value["updated_ms"]), totals)
    except (KeyError, TypeError):
        raise ValueError("not the totals of a gateway") from None
