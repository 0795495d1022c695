"""The boots of all workers, as every gateway heard of them: their last reports and heartbeats.

A worker beats at one gateway; within a second all others know it. Ages are by the clock of Redis,
so that no two machines need the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from gateway.cluster.redis import RedisClient
from gateway.storage.counters import EARLIER_BOOTS, MAX_BOOTS, progress, sum_reports
from workers.protocol import WorkerReport

_BOOTS = "paceline:{fleet}:boots"
_TOLD = "paceline:{fleet}:told"
_FOLDED = "paceline:{fleet}:folded"
# A boot is [progress, when it was first heard of, when it beat last, its report]. Two fields are no
# boots and mark the hash: when it began, so that a new one is not taken for the old one, and how
# often boots were folded. Who reads asks for what was told since its last turn, and a little
# before; for everything where the mark is another. Boots that were folded are known for a day: a
# report of one that comes late counts nothing again.
_EXCHANGE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for i = 3, #ARGV, 4 do
  local name, progress, age, report = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  local kept = redis.call('HGET', KEYS[1], name)
  local before, began, beat, last
  if kept then before, began, beat, last = string.match(kept, '^%[(%d+),(%d+),(%d+),(.*)%]$') end
  if last and (report == '' or tonumber(before) > tonumber(progress)) then
    progress, report = before, last
  end
  if report ~= '' and not redis.call('ZSCORE', KEYS[3], name) then
    local at = tonumber(beat or '0')
    if age >= 0 then at = math.max(at, now - age) elseif age == -2 then at = 1 end
    began = began or string.format('%.0f', now)
    local told = string.format('[%s,%s,%.0f,', progress, began, at) .. report .. ']'
    redis.call('HSET', KEYS[1], name, told)
    redis.call('ZADD', KEYS[2], now, name)
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 3600000)
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - 86400000)
redis.call('PEXPIRE', KEYS[2], 3600000)
redis.call('PEXPIRE', KEYS[3], 86400000)
redis.call('HSETNX', KEYS[1], 'began', string.format('%.0f', now))
local folds = redis.call('HGET', KEYS[1], 'folds') or '0'
local mark = redis.call('HGET', KEYS[1], 'began') .. ' ' .. folds
if ARGV[1] == '' or ARGV[2] ~= mark then
  return {now, mark, 1, redis.call('HGETALL', KEYS[1])}
end
local told = {}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[1] - 3000, '+inf')) do
  told[#told + 1] = name
  told[#told + 1] = redis.call('HGET', KEYS[1], name) or ''
end
return {now, mark, 0, told}
"""
_FOLD = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
if (redis.call('HGET', KEYS[1], ARGV[3]) or '') ~= ARGV[4] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[3], ARGV[5])
redis.call('HINCRBY', KEYS[1], 'folds', 1)
redis.call('ZADD', KEYS[2], redis.call('TIME')[1] * 1000, ARGV[1])
return 1
"""
_PUT_BACK = """
for i = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""
_NO_BEAT_MS = -1
_GOODBYE_MS = -2
_LEFT_AT_MS = 1
_FOLDED_KNOWN = 4096


class Boot(NamedTuple):
    """One boot of one worker as Redis tells of it."""

    written: str
    began_ms: int
    beat_ms: int
    """0: never at a gateway, because it is listed; 1: it said goodbye."""
    report: WorkerReport


class Heard(NamedTuple):
    """What others have told of a worker since the last turn."""

    report: WorkerReport
    age_s: float | None
    """Since its last heartbeat; None where it said goodbye."""


class SharedWorkerReports:
    """The boots that gateways share. Only one task calls `exchange`."""

    def __init__(self, link: RedisClient) -> None:
        self._link = link
        self._exchange, self._fold, self._put_back = (
            link.script(lua) for lua in (_EXCHANGE, _FOLD, _PUT_BACK)
        )
        self._boots: dict[str, Boot] = {}
        self._mine: dict[str, WorkerReport] = {}
        """Reports that this gateway got and Redis may not have yet."""
        self._folded: dict[str, None] = {}
        """Boots that are known to be in the sum of earlier ones, the last few thousand."""
        self._read_ms = ""
        self._mark = ""
        """When the hash began, and how many boots were folded away in it."""
        self._connections = -1

    def store(self, report: WorkerReport) -> None:
        """Keep a report unless a later one of that boot is already kept, or it was folded."""
        if _name(report) in self._folded:
            return
        kept = self._mine.get(_name(report))
        if kept is None or progress(report) >= progress(kept):
            self._mine[_name(report)] = report

    def reports(self) -> tuple[WorkerReport, ...]:
        """Read the last report of every boot, oldest boot first."""
        boots = sorted(self._boots.items(), key=lambda item: item[1].began_ms)
        kept = {name: boot.report for name, boot in boots}
        for name, report in self._mine.items():
            if name not in kept or progress(report) >= progress(kept[name]):
                kept[name] = report
        return tuple(kept.values())

    async def exchange(
        self, beats: Sequence[tuple[WorkerReport, float]], goodbyes: Sequence[WorkerReport]
    ) -> tuple[Heard, ...]:
        """Tell of heartbeats, with their ages, and of workers that left; hear of others'."""
        sent = dict(self._mine)
        ages = {_name(report): int(age_s * 1000) for report, age_s in beats}
        ages |= {_name(report): _GOODBYE_MS for report in goodbyes}
        told = {**{_name(one): one for one, _ in beats}, **sent}
        arguments: list[str | int] = []
        for name in {**ages, **told}:
            report = told.get(name)
            body = ("0", "") if report is None else (progress(report), report.model_dump_json())
            arguments += [name, body[0], ages.get(name, _NO_BEAT_MS), body[1]]
        connections = self._link.connections
        now_ms, mark, whole, heard = await self._link.call("workers", lambda: self._ask(arguments))
        for name, report in sent.items():
            if self._mine.get(name) is report:
                del self._mine[name]
        before, self._mark, self._read_ms = self._mark, mark, str(now_ms)
        if whole:
            lost = {name: one for name, one in self._boots.items() if name not in heard}
            self._boots, self._connections = heard, connections
            if _only_folded(before, mark):
                self._forget(lost)
            elif lost:
                await self._return(lost)
        else:
            self._boots |= heard
        await self._fold_one()
        return tuple(
            Heard(
                boot.report,
                None if boot.beat_ms == _LEFT_AT_MS else (now_ms - boot.beat_ms) / 1000,
            )
            for boot in heard.values()
            if boot.beat_ms
        )

    async def _ask(self, arguments: Sequence[str | int]) -> tuple[int, str, bool, dict[str, Boot]]:
        anew = self._connections != self._link.connections
        question = ["" if anew else self._read_ms, self._mark, *arguments]
        now_ms, mark, whole, flat = await self._exchange([_BOOTS, _TOLD, _FOLDED], question)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        read = {name: _read(written) for name, written in pairs if "/" in name}
        boots = {name: boot for name, boot in read.items() if boot is not None}
        return now_ms, mark, bool(whole), boots

    def _forget(self, sum_reports: Iterable[str]) -> None:
        """Count nothing more of boots that were folded."""
        self._folded |= dict.fromkeys(sum_reports)
        for name in tuple(self._folded)[:-_FOLDED_KNOWN]:
            del self._folded[name]

    async def _return(self, lost: Mapping[str, Boot]) -> None:
        """Put back what Redis has lost; it is read again with the next turn."""
        self._boots = {**lost, **self._boots}
        self._mark = ""
        pairs = [text for name, boot in lost.items() for text in (name, boot.written)]
        await self._link.call("workers", lambda: self._put_back([_BOOTS], pairs))

    async def _fold_one(self) -> None:
        """Add the oldest boot of a worker to the sum of its earlier ones where it has too many."""
        by_worker: dict[str, list[str]] = {}
        for name, boot in sorted(self._boots.items(), key=lambda item: item[1].began_ms):
            if not boot.report.boot_id.startswith(EARLIER_BOOTS):
                by_worker.setdefault(boot.report.worker_id, []).append(name)
        crowded = [names for names in by_worker.values() if len(names) > MAX_BOOTS]
        if not crowded:
            return
        oldest = self._boots[crowded[0][0]]
        boot_id = f"{EARLIER_BOOTS}:{oldest.report.model}"
        sum_name = f"{oldest.report.worker_id}/{boot_id}"
        earlier = self._boots.get(sum_name)
        summed = sum_reports(earlier.report if earlier else None, oldest.report, boot_id)
        text = f"[{progress(summed)},0,0,{summed.model_dump_json()}]"
        steps = [crowded[0][0], oldest.written, sum_name, earlier.written if earlier else "", text]
        await self._link.call("workers", lambda: self._fold([_BOOTS, _FOLDED], steps))


def _only_folded(before: str, mark: str) -> bool:
    """Say whether it is the same hash, with fewer boots because some were folded away."""
    return before != mark and before.partition(" ")[0] == mark.partition(" ")[0]


def _name(report: WorkerReport) -> str:
    return f"{report.worker_id}/{report.boot_id}"


def _read(written: str) -> Boot | None:
    """Read a boot; None for one that another version of Paceline wrote and this cannot read."""
    head = written[1:].split(",", 3)
    try:
        report = WorkerReport.model_validate_json(head[3][:-1])
        return Boot(written, int(head[1]), int(head[2]), report)
    except (IndexError, ValueError, ValidationError):
        return None
