"""Scheduler: gives each request a slot of a worker, at once or from the queue of its pool.

It runs on one event loop without a lock. Each event that may add capacity (a released slot, a
heartbeat, the end of an ejection) calls `wake`, which assigns free slots to queued requests at
once. So no slot is free while a queued request could use it, and no new request overtakes.

Each request is decided by the policy with which it began. A pool is only a name to its queue:
requests of several policy versions may wait in it, also after the newest has dropped the pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from random import Random

from gateway import errors
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.fair_queue import FairQueue, room_for
from gateway.fleet.registry import NO_WORKERS, WorkerRegistry
from gateway.fleet.worker import Lease
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.select import Candidate, Decision, RoutingRequest, decide
from gateway.routing.view import FleetView
from gateway.types import Caller
from paceline.drain_rate import DrainRate, QueuePlace
from paceline.request.profile import bypass_reasons
from policies.document import PolicyDocument

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""A busy worker refuses a request at once: after this time it has accepted it."""
_FLOOD = 16
_FLOOD_LOGGED_S = 60.0


@dataclass(slots=True, eq=False)
class _Waiter:
    """One queued request; it may be in the queues of several pools."""

    request: RoutingRequest
    caller: Caller
    tried: frozenset[str]
    queued_at_s: float
    assigned: asyncio.Future[Lease]
    kind: Hashable
    """If no slot is free for one request, none is for another of the same kind."""
    begun: bool = False
    """A worker had begun the request, so no other one takes its place."""
    pools: list[str] = field(default_factory=list)
    spilled: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    queue: FairQueue[_Waiter] = field(default_factory=FairQueue)
    preferring: int = 0
    """Queued requests that prefer this pool; others wait here because theirs is full."""
    running: int = 0
    """Requests that hold a slot through this pool."""
    drain_rate: DrainRate = field(default_factory=DrainRate)
    flooded_at_s: float = float("-inf")
    """When the log last named a client with many requests in the queue."""

    @property
    def oldest_s(self) -> float:
        return next((waiter.queued_at_s for waiter in self.queue), float("inf"))


class Scheduler:
    """Slots for requests. `clock` is monotonic and in seconds."""

    def __init__(
        self, fleet: WorkerRegistry, prefixes: PrefixIndex, clock: Callable[[], float], rng: Random
    ) -> None:
        self._fleet = fleet
        fleet.on_capacity = self.wake
        self._prefixes = prefixes
        self._clock = clock
        self._rng = rng
        self._pools: defaultdict[str, _Pool] = defaultdict(_Pool)
        """By name, over all versions of the policy."""
        self._waiters: dict[int, _Waiter] = {}
        """By the identity of their requests."""
        self._awaiting = 0
        """Requests that wait for an engine that asked for a pause."""
        self._entries = 0
        """Number of entries into queues so far."""

    def waiting(self, pool: str) -> int:
        """Return the number of queued requests that prefer this pool."""
        return self._pools[pool].preferring

    def running(self, pool: str) -> int:
        """Return the number of requests that hold a slot through this pool."""
        return self._pools[pool].running

    async def acquire(
        self,
        request: RoutingRequest,
        caller: Caller,
        tried: frozenset[str] = NO_WORKERS,
        *,
        on_decision: Callable[[Decision], None] | None = None,
        since_s: float | None = None,
        begun: bool = False,
        awaited: bool = False,
    ) -> Lease:
        """Decide which lane takes a request and acquire a slot there, in the queue if need be.

        `tried` excludes workers. `on_decision` gets the decision before any wait; `since_s` is when
        the request began to wait. A request that a worker had `begun` waits even in a full queue;
        one that has `awaited` a busy engine has less time left there. Raise `PoolsNotAllowed`,
        `FeatureUntaken`, `NoWorker` or `WorkerBusy` if no worker is left, `QueueFull` or
        `QueueTimeout`. The caller must `release` the lease in the same function, however it ends.
        """
        before_s = self._clock()
        decision = self._decide(request, tried, first_only=True)
        if on_decision is not None:
            on_decision(decision)
        if decision.forbidden:
            raise errors.PoolsNotAllowed
        lease = self._first_free(request, decision)
        if lease is None and not decision.complete:
            decision = self._decide(request, tried)
            lease = self._first_free(request, decision)
        if lease is not None:
            return lease
        if not decision.candidates:
            model = request.profile.model
            if decision.lacking and not self._takers(request):
                feature = min(decision.lacking)
                field = dict(request.profile.spelled).get(feature.field or "", feature.field)
                raise errors.FeatureUntaken(model, feature.value, param=field)
            # As of the decision: an engine may have become free since.
            if (busy_s := self._fleet.engine_free_in_s(model, tried, before_s)) is not None:
                since_s = self._clock() if since_s is None else since_s
                await self._await_engine(request, busy_s, since_s)
                return await self.acquire(
                    request, caller, tried, since_s=since_s, begun=begun, awaited=True
                )
            if tried and (lease := self._last_chance(request, tried)) is not None:
                return lease
            if (available_in_s := self._fleet.available_in_s(model)) is not None:
                raise self._busy(model, available_in_s)
            raise errors.NoWorker(f"No worker can take requests for the model '{model}' now.")
        waited_s = self._clock() - since_s if awaited and since_s is not None else 0.0
        return await self._wait(request, decision, caller, tried, begun=begun, waited_s=waited_s)

    def _busy(self, model: str, retry_after_s: float) -> errors.WorkerBusy:
        """Return the error while all workers of a model pause, with the memory if that is why."""
        message = errors.WorkerBusy.message
        if (report := self._fleet.report_short_of_memory(model)) is not None:
            used, limit = report.footprint_bytes / 1e9, report.footprint_limit_bytes / 1e9
            message += f" The memory of a worker is nearly full: it uses {used:.1f} of"
            message += f" {limit:.1f} GB."
        return errors.WorkerBusy(message, retry_after_s=retry_after_s)

    async def _await_engine(self, request: RoutingRequest, busy_s: float, since_s: float) -> None:
        """Wait until an engine is no longer busy; raise `WorkerBusy` at the limits of a queue."""
        queues = [pool.queue for pool in request.policy.pools.values()]
        left_s = since_s + max(queue.timeout_s for queue in queues) - self._clock()
        full = self._awaiting >= max(queue.limit for queue in queues)
        if full or left_s < busy_s:
            raise errors.WorkerBusy(retry_after_s=busy_s)
        self._awaiting += 1
        try:
            await asyncio.sleep(busy_s)
        finally:
            self._awaiting -= 1

    def _decide(
        self,
        request: RoutingRequest,
        tried: frozenset[str] = NO_WORKERS,
        *,
        first_only: bool = False,
        fleet: FleetView | None = None,
    ) -> Decision:
        """Decide by this fleet, or by the present one without the workers tried before."""
        fleet = fleet or self._fleet.view(without=tried)
        cached = self._prefixes.cached(request.prefix)
        return decide(request, fleet, self._clock(), self._rng, cached, first_only=first_only)

    def _takers(self, request: RoutingRequest) -> tuple[Candidate, ...]:
        """Return the lanes of all workers that take such requests, though perhaps not now."""
        return self._decide(request, fleet=self._fleet.view_of_all()).candidates

    def _last_chance(self, request: RoutingRequest, tried: frozenset[str]) -> Lease | None:
        """Acquire a slot of an ejected worker for a request that all others have failed.

        It is better than an error, as it is for the first attempt where all are ejected. Such a
        worker has as many requests at a time as on probation, and none waits for it.
        """
        for candidate in self._takers(request):
            if candidate.worker_id in tried:
                continue
            if (lease := self._take(candidate, request.policy, ejected=True)) is not None:
                return lease
        return None

    def _first_free(self, request: RoutingRequest, decision: Decision) -> Lease | None:
        """Acquire a slot of the first candidate that has one and needs no wait."""
        for candidate in decision.candidates:
            if candidate.spill and decision.spill_after_s != 0:
                break
            if (lease := self._take(candidate, request.policy)) is not None:
                return lease
        return None

    def record_taken(self, lease: Lease) -> None:
        """Record that a worker accepts a request, and let others follow if it was busy."""
        if lease.probes:
            self._fleet.record_taken(lease)
            self.wake()

    def release(self, lease: Lease, result: AttemptResult, retry_after_s: float = 0.0) -> None:
        """Release a slot, record the result, and serve the queues."""
        before = lease.state.breaker
        self._pools[lease.candidate.pool].running -= 1
        self._fleet.release(lease, result, retry_after_s)
        after = lease.state.breaker  # `wake` does not change it
        if self._waiters:
            self.wake()
        if after is not before and after.available_at_s > before.available_at_s:
            delay_s = after.available_at_s - self._clock()
            asyncio.get_running_loop().call_later(delay_s, self.wake)

    def _take(
        self, candidate: Candidate, policy: PolicyDocument, *, ejected: bool = False
    ) -> Lease | None:
        """Acquire a slot of a lane; return None if lane or pool are full."""
        pool = self._pools[candidate.pool]
        bound = policy.pools[candidate.pool].slots
        if bound is not None and pool.running >= bound:
            return None
        lease = self._fleet.acquire(candidate, ejected=ejected)
        if lease is not None:
            pool.running += 1
            if lease.probes:
                asyncio.get_running_loop().call_later(PROBE_S, self.record_taken, lease)
        return lease

    def wake(self) -> None:
        """Assign free slots to queued requests."""
        more = bool(self._waiters)
        while more:
            entered = self._entries
            # Where pools share a lane, the one whose next request waits longest comes first.
            for name, pool in sorted(self._pools.items(), key=lambda item: item[1].oldest_s):
                self._serve(name, pool)
            more = self._entries > entered  # a request entered another queue

    def _serve(self, name: str, pool: _Pool) -> None:
        """Assign the free slots of one pool to requests in its queue."""
        blocked: set[Hashable] = set()
        for waiter in pool.queue:
            kind = (waiter.kind, waiter.spilled)
            if kind in blocked or waiter.assigned.done():
                continue
            if not self._assign(waiter, name):
                blocked.add(kind)

    def queue_place(self, request: RoutingRequest) -> QueuePlace | None:
        """Return the place of a queued request, in the queue that serves it first."""
        waiter = self._waiters.get(id(request))
        if waiter is None or waiter.assigned.done():
            return None
        now_s = self._clock()
        places = [
            pool.drain_rate.place(pool.queue.place(waiter), now_s, pool.running)
            for pool in map(self._pools.__getitem__, waiter.pools)
        ]
        return min(places, key=lambda place: place.wait_s)

    def reject(self, request: RoutingRequest, error: errors.GatewayError) -> None:
        """End the wait of a queued request with an error; do nothing if it waits no more."""
        waiter = self._waiters.get(id(request))
        if waiter is not None and not waiter.assigned.done():
            waiter.assigned.set_exception(error)

    def retry_after_s(self, pool: str) -> float:
        """Estimate when a retry makes sense: when the requests in this queue have a slot."""
        queued = self._pools[pool]
        return queued.drain_rate.retry_after_s(len(queued.queue), self._clock(), queued.running)

    async def _wait(
        self,
        request: RoutingRequest,
        decision: Decision,
        caller: Caller,
        tried: frozenset[str],
        *,
        begun: bool,
        waited_s: float,
    ) -> Lease:
        policy, profile, _, pools, _ = request
        for name in policy.pools:
            self._pools[name]  # exists before a request spills to it
        preferred = decision.candidates[0].pool
        queue = policy.pools[preferred].queue
        full = self.waiting(preferred) >= queue.limit and not begun
        if full and not self._make_room(preferred, caller.client):
            raise errors.QueueFull(retry_after_s=self.retry_after_s(preferred))
        assigned: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        # The route of one policy may be another under the same name in the next.
        kind = (id(policy), profile.model, decision.route, bypass_reasons(profile), tried, pools)
        waiter = _Waiter(request, caller, tried, self._clock(), assigned, kind, begun)
        self._pools[preferred].preferring += 1
        self._waiters[id(request)] = waiter
        try:
            self._enqueue(waiter, preferred)
            left_s = queue.timeout_s - waited_s
            if decision.spill_after_s is not None and decision.spill_after_s < left_s:
                await asyncio.wait((assigned,), timeout=decision.spill_after_s)
                left_s -= decision.spill_after_s
                if not assigned.done():
                    waiter.spilled = True
                    self._widen(waiter)
                    self.wake()
            if not assigned.done():
                await asyncio.wait((assigned,), timeout=left_s)
            if not assigned.done():
                pause_s = self._fleet.available_in_s(profile.model)
                if pause_s is not None and not self._decide(request, tried).candidates:
                    raise self._busy(profile.model, pause_s)
                raise errors.QueueTimeout(retry_after_s=self.retry_after_s(preferred))
            lease = assigned.result()
            lease.waited_s = self._clock() - waiter.queued_at_s
            return lease
        except BaseException:
            # The request ended as it was assigned a slot.
            if assigned.done() and assigned.exception() is None:
                self.release(assigned.result(), AttemptResult.ABANDONED)
            raise
        finally:
            self._pools[preferred].preferring -= 1
            del self._waiters[id(request)]
            for name in waiter.pools:
                self._pools[name].queue.remove(waiter)

    def _make_room(self, pool: str, client: str) -> bool:
        """Reject a queued request in favour of a client with fewer; return whether there is one."""
        waiting = {
            one: one.caller.client
            for one in self._pools[pool].queue
            if one.pools[0] == pool and not (one.assigned.done() or one.begun)
        }
        last = room_for(client, waiting)
        if last is not None:
            last.assigned.set_exception(errors.QueueFull(retry_after_s=self.retry_after_s(pool)))
        return last is not None

    def _enqueue(self, waiter: _Waiter, pool: str) -> None:
        self._entries += 1
        waiter.pools.append(pool)
        entered, now_s = self._pools[pool], self._clock()
        if not entered.queue:
            entered.drain_rate.begin(now_s)
        client = waiter.caller.client
        count = entered.queue.enqueue(waiter, waiter.caller.priority, client)
        if count >= _FLOOD and now_s - entered.flooded_at_s >= _FLOOD_LOGGED_S:
            entered.flooded_at_s = now_s
            log.warning("queue.flooded pool=%s client=%r waiting=%d", pool, client, count)

    def _widen(self, waiter: _Waiter) -> None:
        """Add a request to the queues of all pools that may take it."""
        for candidate in self._decide(waiter.request, waiter.tried).candidates:
            if candidate.pool not in waiter.pools:
                self._enqueue(waiter, candidate.pool)

    def _assign(self, waiter: _Waiter, pool: str) -> bool:
        """Assign a free slot of this pool to a queued request; return whether there was one."""
        for first_only in (True, False):
            decision = self._decide(waiter.request, waiter.tried, first_only=first_only)
            for candidate in decision.candidates:
                if candidate.pool != pool or (candidate.spill and not waiter.spilled):
                    continue
                if (lease := self._take(candidate, waiter.request.policy)) is not None:
                    self._pools[pool].queue.dequeue(waiter)
                    for left in (self._pools[name] for name in waiter.pools):
                        left.queue.remove(waiter)
                        left.drain_rate.record(self._clock(), left.running)
                    waiter.assigned.set_result(lease)
                    return True
            if decision.complete:
                break
        if decision.candidates and decision.candidates[0].pool not in waiter.pools:
            self._widen(waiter)  # its pool has no worker left
        return False
