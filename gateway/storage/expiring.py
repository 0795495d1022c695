"""Records that clients create and that expire: responses and conversations, each of one owner."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gateway.memory_budget import MemoryBudget, MemoryHold

TTL_S = 24 * 3600.0
"""A record expires so long after its last use."""
RECORD_LIMIT_BYTES = 16 * 1024 * 1024
TOTAL_LIMIT_BYTES = 256 * 1024 * 1024
"""Of all records; beyond it the owner with the most gives way, so that none pushes out others."""
OVERHEAD_BYTES = 1024
"""Of a record beside its data, so that empty records are bounded too."""


class ExpiringRecords(Protocol):
    """Records by owner and name. All raise `RecordsUnwritable` where they are on another machine.

    Owners are ids of API keys; no owner sees that another one has a record.
    """

    async def get(
        self,
        owner: str,
        names: Sequence[str],
        hold: Callable[[int], None] = lambda _bytes: None,
    ) -> list[bytes | None]:
        """Return the records of these names, and count them as used.

        `hold` gets their bytes, before they are read from another machine; it may raise.
        """

    async def put(
        self, owner: str, name: str, data: bytes, *, replaces: bytes | None = None
    ) -> bool:
        """Store a record, in place of this one only if there is one to replace.

        Return whether it is stored: not if it is too large, or if another has come before. Raise
        `Overloaded` without memory.
        """

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a record; return whether there was one."""

    async def drop_expired(self) -> None:
        """Delete what has expired, also of owners that never return."""


class _Record(NamedTuple):
    data: bytes
    expires_s: float


class MemoryRecords:
    """Records in the memory of this process, of which they take no more than a limit.

    `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        memory: MemoryBudget,
        *,
        limit_bytes: int = TOTAL_LIMIT_BYTES,
    ) -> None:
        self._clock = clock
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._records: dict[str, OrderedDict[str, _Record]] = {}
        """By owner, those used longest ago first."""
        self._holds: dict[str, MemoryHold] = {}
        """By owner."""

    async def get(
        self,
        owner: str,
        names: Sequence[str],
        hold: Callable[[int], None] = lambda _bytes: None,
    ) -> list[bytes | None]:
        """Return the records of these names, and count them as used."""
        await self.drop_expired()
        records = self._records.get(owner, OrderedDict())
        found: list[bytes | None] = []
        for name in names:
            record = records.get(name)
            if record is not None:
                records[name] = record._replace(expires_s=self._clock() + TTL_S)
                records.move_to_end(name)
            found.append(record.data if record else None)
        hold(sum(len(data) for data in found if data))  # they may be dropped meanwhile
        return found

    async def put(
        self, owner: str, name: str, data: bytes, *, replaces: bytes | None = None
    ) -> bool:
        """Store a record; return whether it is stored."""
        await self.drop_expired()
        present = self._records.get(owner, OrderedDict()).get(name)
        changed = replaces is not None and (present is None or present.data != replaces)
        if changed or len(data) > RECORD_LIMIT_BYTES or _size(data) > self._limit_bytes:
            return False
        with self._memory.hold(owner) as hold:
            hold.add(_size(data))
        self._drop(owner, name)
        records = self._records.setdefault(owner, OrderedDict())
        records[name] = _Record(data, self._clock() + TTL_S)
        self._holds.setdefault(owner, self._memory.hold(owner)).count(_size(data))
        while sum(hold.size_bytes for hold in self._holds.values()) > self._limit_bytes:
            largest = max(self._holds, key=lambda one: self._holds[one].size_bytes)
            self._drop(largest, next(iter(self._records[largest])))
        return name in records

    async def delete(self, owner: str, name: str) -> bool:
        """Delete a record; return whether there was one."""
        await self.drop_expired()
        return self._drop(owner, name)

    async def drop_expired(self) -> None:
        """Delete what has expired, also of owners that never return."""
        now_s = self._clock()
        for owner, records in tuple(self._records.items()):
            while records and (oldest := next(iter(records.items())))[1].expires_s <= now_s:
                self._drop(owner, oldest[0])

    def _drop(self, owner: str, name: str) -> bool:
        records = self._records.get(owner)
        if records is None or (record := records.pop(name, None)) is None:
            return False
        self._holds[owner].count(-_size(record.data))
        if not records:
            self._holds.pop(owner).release()
            del self._records[owner]
        return True


def _size(data: bytes) -> int:
    return len(data) + OVERHEAD_BYTES
