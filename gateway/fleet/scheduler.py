"""Give each request a slot of a worker: at once where one is free, else in its pool's turn.

All of it runs on one event loop and without a lock: whatever may have made room (an answer that
ended, a heartbeat, a worker that comes back) calls `wake`, which gives free slots away
there and then. So a slot is never free while a request waits that could use it, and nobody who
just arrived is faster than those in line.

Each request is decided by the policy that it began with, however long it waits. To a line a pool is
but a name: requests of several versions of the policy may stand in it, and where the newest version
has no such pool any more, those who stand there are served all the same.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random

from gateway.errors import (
    GatewayError,
    NoWorker,
    PoolsNotAllowed,
    QueueFull,
    QueueTimeout,
    WorkerBusy,
)
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.fair_queue import FairQueue
from gateway.fleet.registry import NO_WORKERS, WorkerRegistry
from gateway.fleet.worker import Lease
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.select import Candidate, Decision, RoutingRequest, decide
from gateway.types import Caller
from policies.document import PolicyDocument
from policies.request.profile import RequestProfile, bypass_reasons

_RETRY_AFTER_RANGE_S = (1.0, 60.0)


@dataclass(slots=True, eq=False)
class _Waiter:
    """One request in line; it may stand in the lines of several pools."""

    case: RoutingRequest
    caller: Caller
    tried: frozenset[str]
    entered_s: float
    seat: asyncio.Future[Lease]
    kind: Hashable
    """Where there is no slot for one request, there is none for another of the same kind."""
    pools: list[str] = field(default_factory=list)
    spilled: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    line: FairQueue[_Waiter] = field(default_factory=FairQueue)
    at_home: int = 0
    """Those in line whose preferred pool this is; the others are guests of a full one."""
    running: int = 0
    """Those that hold a slot through this pool."""
    last_wait_s: float = 0.0
    """Of the last one served: the best guess for the next."""


class Scheduler:
    """Slots for requests. `clock` is monotonic and in seconds."""

    def __init__(
        self, fleet: WorkerRegistry, prefixes: PrefixIndex, clock: Callable[[], float], rng: Random
    ) -> None:
        self._fleet = fleet
        self._prefixes = prefixes
        self._clock = clock
        self._rng = rng
        self._pools: defaultdict[str, _Pool] = defaultdict(_Pool)
        """By name, over all versions of the policy."""
        self._waiting = 0
        self._entered = 0
        """How often somebody came to stand in a line."""

    def waiting(self, pool: str) -> int:
        """Count the requests in line whose preferred pool this is."""
        return self._pools[pool].at_home

    def running(self, pool: str) -> int:
        """Count the requests that hold a slot through this pool."""
        return self._pools[pool].running

    async def acquire(
        self,
        case: RoutingRequest,
        caller: Caller,
        tried: frozenset[str] = NO_WORKERS,
        *,
        on_decision: Callable[[Decision], None] | None = None,
    ) -> Lease:
        """Decide which lane takes a request and acquire a slot there, in the queue if need be.

        `tried` excludes workers. `on_decision` gets the decision before any wait. Raise
        `PoolsNotAllowed`, `NoWorker` or `WorkerBusy` if no worker is left, `QueueFull` or
        `QueueTimeout`. The caller must `release` the lease in the same function, however it ends.
        """
        decision = self._decide(case, tried, first_only=True)
        if on_decision is not None:
            on_decision(decision)
        if decision.forbidden:
            raise PoolsNotAllowed
        lease = self._first_free(case, decision)
        if lease is None and not decision.complete:
            decision = self._decide(case, tried)
            lease = self._first_free(case, decision)
        if lease is not None:
            return lease
        if not decision.candidates:
            raise self._no_worker(case.profile)
        return await self._wait(case, decision, caller, tried)

    def _decide(
        self, case: RoutingRequest, tried: frozenset[str], *, first_only: bool = False
    ) -> Decision:
        """Decide as of now, leaving out workers that were tried already."""
        fleet = self._prefixes.annotate(self._fleet.view(without=tried), case.prefix_key)
        return decide(case, fleet, self._rng, first_only=first_only)

    def _first_free(self, case: RoutingRequest, decision: Decision) -> Lease | None:
        """Take a slot of the first that has one, of those that need not be waited for."""
        for candidate in decision.candidates:
            if candidate.spill and decision.spill_after_s != 0:
                break
            if (lease := self._take(candidate, case.policy)) is not None:
                return lease
        return None

    def release(self, lease: Lease, result: AttemptResult, retry_after_s: float = 0.0) -> None:
        """Free the slot, hold what happened against the worker, and let the next one in."""
        before = lease.state.breaker
        self._pools[lease.candidate.pool].running -= 1
        self._fleet.release(lease, result, retry_after_s)
        after = lease.state.breaker  # serving those in line does not change it
        if self._waiting:
            self.wake()
        if after is not before and after.available_at_s > before.available_at_s:
            delay_s = after.available_at_s - self._clock()
            asyncio.get_running_loop().call_later(delay_s, self.wake)

    def _take(self, candidate: Candidate, policy: PolicyDocument) -> Lease | None:
        """Take a slot of this lane, or None where lane or pool have none free now."""
        pool = self._pools[candidate.pool]
        bound = policy.pools[candidate.pool].slots
        if bound is not None and pool.running >= bound:
            return None
        lease = self._fleet.acquire(candidate)
        if lease is not None:
            pool.running += 1
        return lease

    def wake(self) -> None:
        """Give free slots to those in line, for as long as both last."""
        more = self._waiting > 0
        while more:
            entered = self._entered
            # Where pools share a lane, the one whose next request waits longest comes first.
            for name, pool in sorted(self._pools.items(), key=lambda item: _since_s(item[1])):
                self._serve(name, pool)
            more = self._entered > entered  # somebody came to stand in a further line

    def _serve(self, name: str, pool: _Pool) -> None:
        """Give the free slots of one pool to those in its line."""
        hopeless: set[Hashable] = set()
        for waiter in pool.line:
            kind = (waiter.kind, waiter.spilled)
            if kind in hopeless or waiter.seat.done():
                continue
            if not self._seat(waiter, name):
                hopeless.add(kind)

    def retry_after_s(self, pool: str) -> float:
        """Guess when asking again makes sense: as long as the last one served had to wait."""
        low, high = _RETRY_AFTER_RANGE_S
        return min(max(self._pools[pool].last_wait_s, low), high)

    async def _wait(
        self, case: RoutingRequest, decision: Decision, caller: Caller, tried: frozenset[str]
    ) -> Lease:
        policy, profile, _, pools, _ = case
        for name in policy.pools:
            self._pools[name]  # there before anybody moves on to it, so that it is served then
        home = decision.candidates[0].pool
        queue = policy.pools[home].queue
        if self.waiting(home) >= queue.limit:
            raise QueueFull(self.retry_after_s(home))
        seat: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        # The route of one policy may be another under the same name in the next.
        kind = (id(policy), profile.model, decision.route, bypass_reasons(profile), tried, pools)
        waiter = _Waiter(case, caller, tried, self._clock(), seat, kind)
        self._pools[home].at_home += 1
        self._waiting += 1
        try:
            self._enter(waiter, home)
            left_s = queue.timeout_s
            if decision.spill_after_s is not None and decision.spill_after_s < left_s:
                await asyncio.wait((seat,), timeout=decision.spill_after_s)
                left_s -= decision.spill_after_s
                if not seat.done():
                    waiter.spilled = True
                    self._widen(waiter)
                    self.wake()
            if not seat.done():
                await asyncio.wait((seat,), timeout=left_s)
            if not seat.done():
                raise QueueTimeout(self.retry_after_s(home))
            lease = seat.result()
            lease.waited_s = self._clock() - waiter.entered_s
            return lease
        except BaseException:
            if seat.done():  # a slot was given to one who leaves in the same moment
                self.release(seat.result(), AttemptResult.ABANDONED)
            raise
        finally:
            self._pools[home].at_home -= 1
            self._waiting -= 1
            for name in waiter.pools:
                self._pools[name].line.remove(waiter)

    def _enter(self, waiter: _Waiter, pool: str) -> None:
        self._entered += 1
        waiter.pools.append(pool)
        self._pools[pool].line.enqueue(waiter, waiter.caller.priority, waiter.caller.client)

    def _widen(self, waiter: _Waiter) -> None:
        """Let a request stand in the lines of all pools that may take it."""
        for candidate in self._decide(waiter.case, waiter.tried).candidates:
            if candidate.pool not in waiter.pools:
                self._enter(waiter, candidate.pool)

    def _seat(self, waiter: _Waiter, pool: str) -> bool:
        """Give a slot of this pool to a request in line, if one is free that it may have."""
        for first_only in (True, False):
            decision = self._decide(waiter.case, waiter.tried, first_only=first_only)
            for candidate in decision.candidates:
                if candidate.pool != pool or (candidate.spill and not waiter.spilled):
                    continue
                if (lease := self._take(candidate, waiter.case.policy)) is not None:
                    self._leave_lines(waiter, pool)
                    waiter.seat.set_result(lease)
                    return True
            if decision.complete:
                break
        if decision.candidates and decision.candidates[0].pool not in waiter.pools:
            self._widen(waiter)  # nobody is left in the pool that it waited for
        return False

    def _leave_lines(self, waiter: _Waiter, pool: str) -> None:
        self._pools[pool].line.dequeue(waiter)
        for name in waiter.pools:
            self._pools[name].line.remove(waiter)
            self._pools[name].last_wait_s = self._clock() - waiter.entered_s

    def _no_worker(self, profile: RequestProfile) -> GatewayError:
        """Return the error for a request that no worker can take now."""
        available_in_s = self._fleet.available_in_s(profile.model)
        if available_in_s is not None:
            return WorkerBusy(available_in_s)
        return NoWorker(f"No worker can take requests for the model '{profile.model}' now.")


def _since_s(pool: _Pool) -> float:
    return next((waiter.entered_s for waiter in pool.line), float("inf"))
