"""The memory that a gateway holds for its clients: one budget, charged before it is allocated.

Bodies count with their parsed and written forms, stored items by the part that a request reads,
answers until their clients have read them, logs, kept responses and read documents. A client may
hold at most four times the rest: by itself it gets four fifths, and each further client as much of
the rest (dynamic thresholds; Choudhury and Hahne, 1998).
"""

from __future__ import annotations

from typing import Self

from gateway.errors import Overloaded

MEMORY_LIMIT_BYTES = 1024 * 1024 * 1024
_SHARE_OF_REST = 4


class MemoryBudget:
    """The memory of all clients of one gateway. Only its event loop changes it."""

    def __init__(self, limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.by_client: dict[str, int] = {}

    def hold(self, client: str) -> MemoryHold:
        """Return a new hold of a client; as a context it gives back all at its end."""
        return MemoryHold(self, client)


class MemoryHold:
    """The bytes that one request, or one thing that stays, holds for a client."""

    __slots__ = ("_budget", "client", "size_bytes")

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget = budget
        self.client = client
        """May change while nothing is held."""
        self.size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes before they are allocated, or give back; raise `Overloaded` for too many."""
        if not self.count(size_bytes) and size_bytes > 0:
            self.count(-size_bytes)
            raise Overloaded

    def count(self, size_bytes: int) -> bool:
        """Count bytes that are held in any case; return whether there was room for them."""
        budget, client = self._budget, self.client
        self.size_bytes += size_bytes
        budget.held_bytes += size_bytes
        of_client = budget.by_client.get(client, 0) + size_bytes
        budget.by_client[client] = of_client
        return of_client <= _SHARE_OF_REST * (budget.limit_bytes - budget.held_bytes)

    def release(self) -> None:
        """Give back all."""
        budget = self._budget
        self.count(-self.size_bytes)
        if not budget.by_client[self.client]:
            del budget.by_client[self.client]

    def another(self) -> MemoryHold:
        """Return a hold of the same client with an end of its own."""
        return MemoryHold(self._budget, self.client)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
