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

from gateway.state.counters import CounterKey, TakePending
from gateway.state.redis import RedisClient
from gateway.state.shared_hash import SharedHash
from gateway.state.worker_reports import SharedWorkerReports
from paceline.protocol import WorkerReport

_SUM = "earlier"
_FOLD_AFTER_MS = 3_600_000
_TOMBSTONE_S = 30 * 86_400
# A process that was folded while Redis was unreachable gets its folded totals, and writes nothing.
_WRITES = """
local id, totals = ARGV[4], ARGV[5]
local result = tombstone(id) or ''
if result == '' then
  write(id, string.format('{"updated_ms":%.0f,"totals":', now) .. totals .. '}')
end
"""


class _Totals(NamedTuple):
    """The totals of one process, and the time of its last write by the clock of Redis."""

    text: str
    updated_ms: int
    totals: Mapping[CounterKey, int]


class SharedCounters:
    """The counters that gateways share. Only one task calls `exchange`."""

    def __init__(
        self, redis: RedisClient, reports: SharedWorkerReports, take_pending: TakePending = dict
    ) -> None:
        self._reports = reports
        self._shared = SharedHash(redis, "counters", "totals", _WRITES, _parse)
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
        """Write the totals of this process, and read those of others."""
        self._own.update(self._take_pending())
        exchanged = await self._shared.exchange([self._id, _totals_json(self._own)])
        if exchanged.result:
            # Continue under another id, without the totals that were folded.
            self._own.subtract(_parse(exchanged.result).totals)
            self._own = +self._own
            self._id = secrets.token_hex(8)
            return
        await self._fold_one(exchanged.now_ms)

    async def _fold_one(self, now_ms: int) -> None:
        """Fold the totals of one process that has written nothing for an hour."""
        for process, one in self._shared.values.items():
            if process not in (_SUM, self._id) and now_ms - one.updated_ms > _FOLD_AFTER_MS:
                summed = Counter(one.totals)
                if earlier := self._shared.values.get(_SUM):
                    summed.update(earlier.totals)
                new = f'{{"updated_ms":0,"totals":{_totals_json(summed)}}}'
                await self._shared.fold(process, _SUM, new, tombstone=one.text, keep_s=_TOMBSTONE_S)
                return


def _totals_json(totals: Mapping[CounterKey, int]) -> str:
    return json.dumps([[list(key), amount] for key, amount in totals.items()])


def _parse(text: str) -> _Totals:
    """Parse the totals of a process; raise `ValueError`."""
    try:
        value = json.loads(text)
        totals = {tuple(key): int(amount) for key, amount in value["totals"]}
        return _Totals(text, int(value["updated_ms"]), totals)
    except (KeyError, TypeError):
        raise ValueError("not the totals of a gateway") from None
