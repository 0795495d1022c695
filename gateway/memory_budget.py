"""The memory that a gateway holds for its clients: one budget, charged before it is allocated.

Bodies count with what is parsed and written of them, stored items with what a request reads of
them, answers until their clients have read them, logs, kept responses and read documents. A client
may hold at most four times what is left for others: alone it gets four fifths, and each further
client as much of the rest (dynamic thresholds; Choudhury and Hahne, 1998).
"""

from __future__ import annotations

from typing import Self

from gateway.errors import Overloaded

MEMORY_LIMIT_BYTES = 1024 * 1024 * 1024
_SHARE_OF_REST = 4


class MemoryBudget:
    """What all clients of one gateway hold. Only its event loop counts."""

    def __init__(self, limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        self.by_client: dict[str, int] = {}
        """Without clients that hold nothing."""

    def hold(self, client: str) -> MemoryHold:
        """Return a new hold of a client; as a context it gives back all at its end."""
        return MemoryHold(self, client)

    def add(self, client: str, size_bytes: int) -> None:
        """Count bytes before they are allocated, or give back; raise `Overloaded` for too many."""
        if size_bytes > 0 and not self._has_room(client, size_bytes):
            raise Overloaded
        self.count(client, size_bytes)

    def count(self, client: str, size_bytes: int) -> bool:
        """Count bytes that are held in any case; return whether there was room for them."""
        had_room = self._has_room(client, size_bytes)
        self.held_bytes += size_bytes
        held_bytes = self.by_client.get(client, 0) + size_bytes
        if held_bytes:
            self.by_client[client] = held_bytes
        else:
            self.by_client.pop(client, None)
        return had_room

    def _has_room(self, client: str, size_bytes: int) -> bool:
        rest_bytes = self._limit_bytes - self.held_bytes - size_bytes
        return self.by_client.get(client, 0) + size_bytes <= _SHARE_OF_REST * rest_bytes


class MemoryHold:
    """The bytes that one request, or one thing that stays, holds for a client."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget = budget
        self.client = client
        """May change while nothing is held."""
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes before they are allocated, or give back; raise `Overloaded` for too many."""
        self._budget.add(self.client, size_bytes)
        self.size_bytes += size_bytes

    def count(self, size_bytes: int) -> bool:
        """Count bytes that are held in any case; return whether there was room for them."""
        self.size_bytes += size_bytes
        return self._budget.count(self.client, size_bytes)

    def release(self) -> None:
        """Give back all."""
        self.add(-self.size_bytes)

    def another(self) -> MemoryHold:
        """Return a hold of the same client with an end of its own."""
        return MemoryHold(self._budget, self.client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
