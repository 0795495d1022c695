"""The boots of all workers: their last reports and heartbeats, exchanged over Redis.

A worker sends heartbeats to one gateway; within a second all gateways have them. Ages are computed
with the clock of Redis, so that no two machines need the same time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

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

_TOMBSTONE_S = 86_400
_ATTEMPTS = 3
"""Of an exchange: another gateway may write the same boot between a read and a write."""
_MAX_FOLDED = 4096
_MAX_PENDING = 1024
# Others wait until workers that are gone have been folded, one in each exchange.
_MAX_STORED_WORKERS = 2 * MAX_WORKERS


class _Boot(BaseModel):
    """One boot of one worker, as Redis has it."""

    report: Json[WorkerReport]
    progress: Count = 0
    first_seen_ms: Count
    heartbeat_ms: Count | None = None
    """None: no gateway had a heartbeat, because the worker is configured by hand."""
    left: bool = False


class _Update(NamedTuple):
    """The state of a boot that a gateway knows."""

    report: WorkerReport
    heartbeat_age_s: float | None = None
    left: bool = False


class SharedWorkerReports:
    """The boots that gateways share. Only one task calls `exchange`."""

    def __init__(self, redis: RedisClient) -> None:
        self._shared = SharedHash(redis, "workers", "boots", _parse)
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
        updates = {name: _Update(report) for name, report in sent.items()}
        for report, age_s in heartbeats:
            if self._has_space(report):
                name = boot_name(report)
                updates[name] = _Update(sent.get(name, report), age_s)
        for report in departures:
            if (name := boot_name(report)) in sent or name in self._shared.values:
                updates[name] = _Update(sent.get(name, report), left=True)
        now_ms, updated, unsent = await self._share(updates)
        for name, report in sent.items():
            if self._pending.get(name) is report and name not in unsent:
                del self._pending[name]
        for name in tuple(self._folded)[:-_MAX_FOLDED]:
            del self._folded[name]
        # As written here since: what was read may say that a worker left which has come back. The
        # last boot of a worker comes last.
        news = [boot for name, boot in self._shared.values.items() if name in updated]
        news.sort(key=lambda boot: boot.heartbeat_ms or 0)
        await self._fold_one()
        self._workers = {boot.report.worker_id for boot in self._shared.values.values()}
        return [
            (boot.report, None if boot.left else (now_ms - (boot.heartbeat_ms or 0)) / 1000)
            for boot in news
            if boot.left or (boot.heartbeat_ms is not None and boot.heartbeat_ms <= now_ms)
        ]

    async def _share(
        self, updates: dict[str, _Update]
    ) -> tuple[int, Collection[str], Collection[str]]:
        """Merge updates into the boots in Redis.

        Return the time, the names of the boots that were written since the last exchange, and the
        ones that other gateways wrote at the same time.
        """
        updated: set[str] = set()
        for _ in range(_ATTEMPTS):
            changes = await self._shared.read()
            updated |= changes.updated.keys()
            self._folded |= dict.fromkeys(changes.folded)
            boots = self._shared.values
            texts = {
                name: _text(_merge(boots.get(name), update, changes.now_ms))
                for name, update in updates.items()
            }
            refused = await self._shared.write(texts) if texts else {}
            updates = {name: updates[name] for name, folded in refused.items() if not folded}
            if not updates:
                break
        return changes.now_ms, updated, updates.keys()

    def _oldest_first(self) -> list[tuple[str, _Boot]]:
        return sorted(self._shared.values.items(), key=lambda item: item[1].first_seen_ms)

    def _has_space(self, report: WorkerReport) -> bool:
        return report.worker_id in self._workers or len(self._workers) < _MAX_STORED_WORKERS

    async def _fold_one(self) -> None:
        """Fold the oldest boot of a worker with too many boots, or of a missing worker.

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
        text = _text(
            _Boot.model_construct(report=summed, progress=progress(summed), first_seen_ms=0)
        )
        if await self._shared.fold(name, into, text, tombstone="folded", keep_s=_TOMBSTONE_S):
            self._folded[name] = None


def _last_seen_ms(boots: Mapping[str, _Boot]) -> int:
    return max(boot.heartbeat_ms or boot.first_seen_ms for boot in boots.values())


def boot_name(report: WorkerReport) -> str:
    """Return the name of a boot, unique among all workers."""
    return f"{report.worker_id}/{report.boot_id}"


def _merge(boot: _Boot | None, update: _Update, now_ms: int) -> _Boot:
    """Return a boot with the state that a gateway knows."""
    age_s = update.heartbeat_age_s
    heartbeat_ms = None if age_s is None else now_ms - int(age_s * 1000)
    fresh = _Boot.model_construct(
        report=update.report,
        progress=progress(update.report),
        first_seen_ms=now_ms,
        heartbeat_ms=heartbeat_ms,
        left=update.left,
    )
    if boot is None:
        return fresh
    known_ms = boot.heartbeat_ms or 0
    if known_ms > now_ms:
        known_ms = 0  # from before the clock of Redis was set back
    # A gateway may write a heartbeat later than another one that has probed the worker since.
    older = heartbeat_ms is not None and heartbeat_ms < known_ms
    changes: dict[str, object] = {"first_seen_ms": boot.first_seen_ms}
    if fresh.progress < boot.progress or (fresh.progress == boot.progress and older):
        changes |= {"report": boot.report, "progress": boot.progress}
    if heartbeat_ms is None:
        changes |= {"heartbeat_ms": boot.heartbeat_ms, "left": boot.left or update.left}
    elif older and not boot.left:
        changes["heartbeat_ms"] = known_ms
    return fresh.model_copy(update=changes)


def _text(boot: _Boot) -> str:
    fields = boot.model_dump(exclude={"report"}, exclude_none=True)
    return json.dumps({**fields, "report": boot.report.model_dump_json()})


def _parse(text: str) -> _Boot | None:
    """Parse a boot; return None for text of another version of Paceline, or a damaged one."""
    try:
        return _Boot.model_validate_json(text)
    except ValidationError:
        return None
