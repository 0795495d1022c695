"""A waiting line that is fair: by weight between priorities, evenly between clients. Pure.

Self-clocked fair queueing (Golestani, 1994): each ticket gets a finish time in virtual time, one
step of 1 / weight behind the last ticket of the same client and priority, but never in the past;
the earliest is next. So a client that sends a hundred requests delays its own, not another's, and
bulk work is slow but never starves.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, TypeVar

from policies.document import Priority

WEIGHTS = {Priority.INTERACTIVE: 16, Priority.DEFAULT: 4, Priority.BULK: 1}

Ticket = TypeVar("Ticket")
_Flow = tuple[Priority, str]


class FairQueue(Generic[Ticket]):
    """Tickets in the order in which they are to be served."""

    def __init__(self) -> None:
        self._order: list[tuple[float, int, Ticket]] = []
        self._places: dict[Ticket, tuple[float, int, _Flow]] = {}
        self._flows: dict[_Flow, tuple[float, int]] = {}
        """The last finish time of each flow that waits, and how many of its tickets wait."""
        self._virtual = 0.0
        self._entered = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Ticket]:
        """List the tickets, next one first; the line may change meanwhile."""
        return iter([ticket for _, _, ticket in self._order])

    def enqueue(self, ticket: Ticket, priority: Priority, client: str) -> None:
        """Stand in line."""
        flow = (priority, client)
        last, waiting = self._flows.get(flow, (0.0, 0))
        finish = max(self._virtual, last) + 1 / WEIGHTS[priority]
        self._flows[flow] = (finish, waiting + 1)
        self._entered += 1
        self._places[ticket] = (finish, self._entered, flow)
        bisect.insort(self._order, (finish, self._entered, ticket))

    def dequeue(self, ticket: Ticket) -> None:
        """Take a ticket out because its turn has come: time passes for the others."""
        finish, _, _ = self._places[ticket]
        self._virtual = max(self._virtual, finish)
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out that waits no longer; one that is not in line may leave too."""
        place = self._places.pop(ticket, None)
        if place is None:
            return
        finish, number, flow = place
        del self._order[bisect.bisect_left(self._order, (finish, number))]
        last, waiting = self._flows.pop(flow)
        if waiting > 1:
            self._flows[flow] = (last, waiting - 1)
        if not self._order:
            self._virtual = 0.0
