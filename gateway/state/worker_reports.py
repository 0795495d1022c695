"""The boots of all workers: their last reports and heartbeats, exchanged over Redis.

A worker sends heartbeats to one gateway; within a second all gateways have them. Ages are computed
with the clock of Redis, so that no two machines need the same time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Json, ValidationError

from gateway.state.counters import (
    GONE_WORKERS,
    MAX_BOOTS,
    MAX_WORKERS,
    progress,
    sum_name,
    sum_reports,
)
from gateway.state.redis import RedisClient
from gateway.state.shared_hash import SharedHash
from paceline.protocol import EARLIER_BOOTS, Count, WorkerReport

# The argument maps the names of boots to updates; all fields of an update are optional:
# {"report": text, "progress": number, "heartbeat_age_ms": number, "left": true}
_WRITES = """
local function read(name)
  local readable, boot = pcall(cjson.decode, redis.call('HGET', KEYS[1], name) or '')
  if readable and type(boot) == 'table' and boot.first_seen_ms then return boot end
  return {progress = 0, first_seen_ms = now, left = false}
end
for name, update in pairs(cjson.decode(ARGV[4])) do
  local boot = read(name)
  -- A gateway may write a heartbeat later than another one that has probed the worker since.
  local known_ms = (boot.heartbeat_ms or 0) <= now and boot.heartbeat_ms or 0
  local older = update.heartbeat_age_ms and now - update.heartbeat_age_ms < known_ms
  local ahead = update.progress and update.progress - boot.progress
  if ahead and (ahead > 0 or (ahead == 0 and not older)) then
    boot.progress, boot.report = update.progress, update.report
  end
  if update.left then
    boot.left = true
  elseif update.heartbeat_age_ms then
    local heartbeat_ms = now - update.heartbeat_age_ms
    -- A heartbeat of the future is from before the clock of Redis was set back.
    if boot.left or (boot.heartbeat_ms or 0) > now then boot.heartbeat_ms = nil end
    boot.heartbeat_ms = math.max(boot.heartbeat_ms or heartbeat_ms, heartbeat_ms)
    boot.left = false
  end
  if boot.report and not tombstone(name) then write(name, cjson.encode(boot)) end
end
local result = ''
"""
_TOMBSTONE_S = 86_400
_MAX_FOLDED = 4096
_MAX_PENDING = 1024
# Others wait until workers that are gone have been folded, one in each exchange.
_MAX_STORED_WORKERS = 2 * MAX_WORKERS


class _Boot(NamedTuple):
    """One boot of one worker."""

    text: str
    first_seen_ms: int
    heartbeat_ms: int | None
    """None: no gateway had a heartbeat, because the worker is configured by hand."""
    left: bool
    report: WorkerReport


class _StoredBoot(BaseModel):
    """The value of a boot in Redis."""

    report: Json[WorkerReport]
    first_seen_ms: Count
    heartbeat_ms: Count | None = None
    left: bool


class SharedWorkerReports:
    """The boots that gateways share. Only one task calls `exchange`."""

    def __init__(self, redis: RedisClient) -> None:
        self._shared = SharedHash(redis, "workers", "boots", _WRITES, _parse)
        self._pending: dict[str, WorkerReport] = {}
        """Reports that Redis may not have yet."""
        self._folded: dict[str, None] = {}
        """The last boots that were folded: a late report of one must not count again."""
        self._workers: set[str] = set()
        """The ids of the workers in the hash."""

    def store(self, report: WorkerReport) -> None:
        """Store a report unless a later one of that boot is stored, or the boot is folded."""
        name = boot_name(report)
        stored = self._pending.get(name)
        if stored is None and (len(self._pending) >= _MAX_PENDING or not self._has_space(report)):
            return  # a later report of the boot has the same counts
        if name not in self._folded and (stored is None or progress(report) >= progress(stored)):
            self._pending[name] = report

    def reports(self) -> tuple[WorkerReport, ...]:
        """Return the last report of every boot, oldest boot first."""
        reports = {name: boot.report for name, boot in self._oldest_first()}
        for name, report in self._pending.items():
            if name not in reports or progress(report) >= progress(reports[name]):
                reports[name] = report
        return tuple(reports.values())

    async def exchange(
        self, heartbeats: Sequence[tuple[WorkerReport, float]], departures: Sequence[WorkerReport]
    ) -> list[tuple[WorkerReport, float | None]]:
        """Write heartbeats with their ages, departures and pending reports.

        Return the workers with news, and the seconds since their last heartbeat; None: it left.
        """
        sent = dict(self._pending)
        heartbeats = [one for one in heartbeats if self._has_space(one[0])]
        updates: dict[str, dict[str, Any]] = {}
        for name, report in {**{boot_name(one): one for one, _ in heartbeats}, **sent}.items():
            updates[name] = {"report": report.model_dump_json(), "progress": progress(report)}
        for report, age_s in heartbeats:
            updates[boot_name(report)]["heartbeat_age_ms"] = int(age_s * 1000)
        for report in departures:
            updates.setdefault(boot_name(report), {})["left"] = True
        exchanged = await self._shared.exchange([json.dumps(updates)])
        for name, report in sent.items():
            if self._pending.get(name) is report:
                del self._pending[name]
        self._folded |= dict.fromkeys(exchanged.folded)
        for name in tuple(self._folded)[:-_MAX_FOLDED]:
            del self._folded[name]
        await self._fold_one()
        self._workers = {boot.report.worker_id for boot in self._shared.values.values()}
        changes: list[tuple[WorkerReport, float | None]] = []
        for boot in exchanged.updated.values():
            if boot.left:
                changes.append((boot.report, None))
            elif boot.heartbeat_ms is not None and boot.heartbeat_ms <= exchanged.now_ms:
                changes.append((boot.report, (exchanged.now_ms - boot.heartbeat_ms) / 1000))
        return changes

    def _oldest_first(self) -> list[tuple[str, _Boot]]:
        return sorted(self._shared.values.items(), key=lambda item: item[1].first_seen_ms)

    def _has_space(self, report: WorkerReport) -> bool:
        return report.worker_id in self._workers or len(self._workers) < _MAX_STORED_WORKERS

    async def _fold_one(self) -> None:
        """Fold the oldest boot of one worker that has too many, or of one that is gone.

        Never the boot with the last heartbeat of a worker: no gateway would hear of it again.
        """
        by_worker: dict[str, dict[str, _Boot]] = {}
        for name, boot in self._oldest_first():
            by_worker.setdefault(boot.report.worker_id, {})[name] = boot
        for worker_id, boots in by_worker.items():
            unfolded = [
                name
                for name, boot in boots.items()
                if not boot.report.boot_id.startswith(EARLIER_BOOTS)
            ]
            if len(unfolded) > MAX_BOOTS:
                running = max(unfolded, key=lambda name: boots[name].heartbeat_ms or 0)
                oldest = next(name for name in unfolded if name != running)
                await self._fold(oldest, worker_id, boots)
                return
        sums = by_worker.pop(GONE_WORKERS, {})
        if len(by_worker) > MAX_WORKERS:
            gone = min(by_worker.values(), key=_last_seen_ms)
            await self._fold(next(iter(gone)), GONE_WORKERS, sums)

    async def _fold(self, name: str, worker_id: str, boots: Mapping[str, _Boot]) -> None:
        """Add a boot to the sum of earlier boots of a worker, which has these boots."""
        report = self._shared.values[name].report
        boot_id = sum_name(report, [boot.report.boot_id for boot in boots.values()])
        into = f"{worker_id}/{boot_id}"
        earlier = self._shared.values.get(into)
        summed = sum_reports(earlier.report if earlier else None, report, boot_id, worker_id)
        fields = {"first_seen_ms": 0, "left": False, "progress": progress(summed)}
        text = json.dumps({**fields, "report": summed.model_dump_json()})
        if await self._shared.fold(name, into, text, tombstone="folded", keep_s=_TOMBSTONE_S):
            self._folded[name] = None


def _last_seen_ms(boots: Mapping[str, _Boot]) -> int:
    return max(boot.heartbeat_ms or boot.first_seen_ms for boot in boots.values())


def boot_name(report: WorkerReport) -> str:
    """Return the name of a boot, unique among all workers."""
    return f"{report.worker_id}/{report.boot_id}"


def _parse(text: str) -> _Boot | None:
    """Parse a boot; return None for text of another version of Paceline, or a damaged one."""
    try:
        stored = _StoredBoot.model_validate_json(text)
    except ValidationError:
        return None
    return _Boot(text, stored.first_seen_ms, stored.heartbeat_ms, stored.left, stored.report)
