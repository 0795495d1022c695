"""A fair queue: by weight between priorities, evenly between clients. Pure.

Self-clocked fair queueing (Golestani, 1994): each ticket gets a finish time in virtual time, one
step of 1 / weight behind the last ticket of the same client and priority, but never in the past;
the earliest is next, and of two equal ones that of the client with fewer tickets before it. So a
client that sends a hundred requests delays its own, not another's, which waits for at most one of
them; and bulk work is slow but never starves.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from paceline.request.profile import Priority

WEIGHTS = {Priority.INTERACTIVE: 16, Priority.DEFAULT: 4, Priority.BULK: 1}

Ticket = TypeVar("Ticket")
Waiting = TypeVar("Waiting", bound=Hashable)
_Flow = tuple[Priority, str]


class FairQueue(Generic[Ticket]):
    """Tickets in the order of service."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, int, Ticket]] = []
        """Finish time, tickets of the flow before it, sequence number, ticket."""
        self._entries: dict[Ticket, tuple[float, int, int, _Flow]] = {}
        self._flows: dict[_Flow, tuple[float, int]] = {}
        """Last finish time and number of waiting tickets of each flow."""
        self._virtual_time = 0.0
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over a copy of the tickets, the next one first."""
        return iter([ticket for *_, ticket in self._order])

    def enqueue(self, ticket: Ticket, priority: Priority, client: str) -> int:
        """Add a ticket; return how many of its client and priority wait with it."""
        flow = (priority, client)
        last, waiting = self._flows.get(flow, (0.0, 0))
        finish = max(self._virtual_time, last) + 1 / WEIGHTS[priority]
        self._flows[flow] = (finish, waiting + 1)
        self._sequence += 1
        self._entries[ticket] = (finish, waiting, self._sequence, flow)
        bisect.insort(self._order, (finish, waiting, self._sequence, ticket))
        return waiting + 1

    def place(self, ticket: Ticket) -> int:
        """Return the place of a waiting ticket: 1 for the next one."""
        *place, _ = self._entries[ticket]
        return bisect.bisect_left(self._order, tuple(place)) + 1

    def dequeue(self, ticket: Ticket) -> None:
        """Remove a ticket that is served, and advance the virtual time."""
        finish = self._entries[ticket][0]
        self._virtual_time = max(self._virtual_time, finish)
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that is not served; do nothing if it is not in the queue."""
        entry = self._entries.pop(ticket, None)
        if entry is None:
            return
        *place, flow = entry
        del self._order[bisect.bisect_left(self._order, tuple(place))]
        last, waiting = self._flows.pop(flow)
        if waiting > 1:
            self._flows[flow] = (last, waiting - 1)
        if not self._order:
            self._virtual_time = 0.0


def room_for(client: str, waiting: dict[Waiting, str]) -> Waiting | None:
    """Return the waiting ticket that leaves for a client with fewer; None: it has as many.

    `waiting` has their clients in order. The last one of the client with the most leaves.
    """
    counts = Counter(waiting.values())
    most = max(counts.values(), default=0)
    if counts[client] + 1 >= most:
        return None
    return next(one for one in reversed(waiting) if counts[waiting[one]] == most)
