"""What an admin makes, kept in Redis, with a copy in the state folder for when that is away.

No edit is written to the copy: where Redis cannot be asked nothing can be changed, and what was
last known stays so. A revoked key stays revoked, also over a restart. Where Redis has lost its
data, whoever still knows it puts it back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gateway.cluster.redis import RedisClient
from gateway.errors import RecordsUnwritable
from gateway.storage.records import Texts, TextsByKind, exclusive_writer, read_file, write_file

log = logging.getLogger(__name__)

# One hash for each kind: the name of a record -> [its place in the order, its text], and under the
# empty name the turn of the last change. Turns are milliseconds or more, so that a hash that is
# lost and begun anew is never taken for the one that was read.
_TURN = """
local function turn(key)
  local t = redis.call('TIME')
  local n = t[1] * 1000 + math.floor(t[2] / 1000)
  local last = tonumber(redis.call('HGET', key, '') or '0')
  if n <= last then n = last + 1 end
  local told = string.format('%.0f', n)
  redis.call('HSET', key, '', told)
  return told
end
"""
_READ = """
local turn = redis.call('HGET', KEYS[1], '') or ''
if turn ~= '' and turn == ARGV[1] then return {turn, {}} end
return {turn, redis.call('HGETALL', KEYS[1])}
"""
_ADD = f"""{_TURN}
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], '[' .. turn(KEYS[1]) .. ',' .. ARGV[2] .. ']')
return 1
"""
_REPLACE = f"""{_TURN}
local kept = redis.call('HGET', KEYS[1], ARGV[1])
local place = kept and string.match(kept, '^%[(%d+),')
local now = turn(KEYS[1])
redis.call('HSET', KEYS[1], ARGV[1], '[' .. (place or now) .. ',' .. ARGV[2] .. ']')
return 1
"""
_REMOVE = f"""{_TURN}
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then turn(KEYS[1]) end
return 1
"""
_PUT_BACK = f"""{_TURN}
local changed = false
for i = 1, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 1 then changed = true end
end
if changed then turn(KEYS[1]) end
return 1
"""
_WRITTEN = re.compile(r"\[(\d+),(.*)\]", re.DOTALL)


class _Record(NamedTuple):
    place: int
    text: str

    def written(self) -> str:
        return f"[{self.place},{self.text}]"


class _Known(NamedTuple):
    """What was last known of one kind, and as of when."""

    records: Mapping[str, _Record]
    turn: str = ""
    """Of the last change that was read; empty: read everything, whatever it is."""
    connections: int = -1
    """How many there had been when nothing was missing."""
    fresh: bool = False
    """Read in this life; otherwise it is from the copy."""


class RedisRecords:
    """Records that all gateways share; raise `RecordsUnwritable` where a change cannot be kept."""

    remote = True

    def __init__(self, link: RedisClient, folder: Path) -> None:
        self._link = link
        self._read, self._add, self._replace, self._remove, self._put_back = (
            link.script(lua) for lua in (_READ, _ADD, _REPLACE, _REMOVE, _PUT_BACK)
        )
        self._copy = folder / f"shared-{link.address_digest}.json"
        self._known = {kind: _Known(_numbered(one)) for kind, one in _from(self._copy).items()}
        self._looking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._copying: asyncio.Task[None] | None = None
        self._copy_is_old = False

    def is_current(self, kind: str) -> bool:
        """Say whether `all` tells what is kept, or was in this life; not what a file remembers."""
        return kind in self._known and self._known[kind].fresh

    async def all(self, kind: str) -> Mapping[str, str]:
        """Read all records of a kind by name, oldest first, or what was last known of them."""
        if not self._link.unreachable:
            look = asyncio.create_task(self._look_in_turn(kind), name=f"look at {kind}")
            if self.is_current(kind):
                await self._link.waited(look)  # an admin may be waiting
            else:
                await look  # nobody is served yet by what was never read
        return self._texts(kind)

    async def _look_in_turn(self, kind: str) -> None:
        """Look, one after the other: what was read first must not be taken last."""
        async with self._looking[kind]:
            with contextlib.suppress(RecordsUnwritable):  # the link tells
                await self._look(kind)

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Keep a new record unless there is one of that name."""
        return bool(await self._link.edit(lambda: self._add([_key(kind)], [name, text])))

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Keep a record in place of the one of that name."""
        await self._link.edit(lambda: self._replace([_key(kind)], [name, text]))

    async def remove(self, kind: str, name: str) -> None:
        """Forget a record."""
        await self._link.edit(lambda: self._remove([_key(kind)], [name]))

    async def _look(self, kind: str) -> None:
        """Read what has changed, and put back what Redis has lost."""
        part, known = f"records of {kind}", self._known.get(kind, _Known({}))
        connections = self._link.connections
        turn, told = await self._link.call(part, lambda: self._news(kind, known.turn))
        if told is None:
            self._known[kind] = known._replace(connections=connections, fresh=True)
            return
        # Nobody removes what others may need: what is gone behind a new connection was lost.
        lost: dict[str, _Record] = {}
        if self._link.connections != known.connections or _number(turn) < _number(known.turn):
            lost = {name: one for name, one in known.records.items() if name not in told}
        # It is known from here on, also where it cannot be put back.
        self._known[kind] = _Known({**lost, **told}, "", known.connections, fresh=True)
        if lost:
            await self._link.call(part, lambda: self._return(kind, lost))
            log.warning("redis.put_back kind=%s records=%d", kind, len(lost))
        records = {**lost, **told}
        self._known[kind] = _Known(records, turn, connections, fresh=True)
        if records == known.records:
            return
        self._copy_is_old = True
        if self._copying is None or self._copying.done():
            # Beside: a disk that hangs must not keep a revoked key open.
            self._copying = asyncio.create_task(self._keep_copy(), name="copy of records")

    async def _news(self, kind: str, turn: str) -> tuple[str, dict[str, _Record] | None]:
        """Ask for all records unless this was the last change; raise `ValueError`."""
        latest, told = await self._read([_key(kind)], [turn])
        if turn and latest == turn:
            return latest, None
        records = zip(told[::2], told[1::2], strict=True)
        return latest, {name: _read_one(text) for name, text in records if name}

    async def _return(self, kind: str, lost: Mapping[str, _Record]) -> None:
        pairs = [text for name, one in lost.items() for text in (name, one.written())]
        await self._put_back([_key(kind)], pairs)

    def _texts(self, kind: str) -> Texts:
        known = self._known.get(kind, _Known({}))
        in_order = sorted(known.records.items(), key=lambda item: item[1].place)
        return {name: record.text for name, record in in_order}

    async def _keep_copy(self) -> None:
        """Write down what is known, for a start without Redis."""
        while self._copy_is_old:
            self._copy_is_old = False
            shelves = {kind: self._texts(kind) for kind in self._known}
            try:
                await asyncio.to_thread(self._write_copy, shelves)
            except (OSError, ValueError) as error:
                log.warning("redis.no_copy why=%s", type(error).__name__)

    def _write_copy(self, shelves: TextsByKind) -> None:
        with exclusive_writer(self._copy):
            write_file(self._copy, shelves)


def _key(kind: str) -> str:
    return f"paceline:{{{kind}}}:records"


def _number(turn: str) -> int:
    return int(turn or 0)


def _read_one(text: str) -> _Record:
    """Read a value; one that Paceline did not write becomes a mere text, and opens nothing."""
    match = _WRITTEN.fullmatch(text)
    return _Record(int(match[1]), match[2]) if match else _Record(0, json.dumps(text))


def _numbered(shelf: Texts) -> dict[str, _Record]:
    return {name: _Record(place, text) for place, (name, text) in enumerate(shelf.items())}


def _from(copy: Path) -> TextsByKind:
    """Read the copy; one that cannot be read is none."""
    try:
        return read_file(copy)
    except (OSError, ValueError):
        log.warning("redis.copy_unreadable file=%s", copy)
        return {}
