"""The live worker table: who beats, who has a free slot, who is left alone for a while.

The last look at the workers that take requests: between two requests only few change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.config.static_workers import ListedWorker
from gateway.errors import WorkerIdTaken
from gateway.fleet.circuit_breaker import HEALTHY, AttemptResult
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease, WorkerState, serves_alike
from gateway.routing.select import Candidate
from gateway.routing.view import FleetView, WorkerView, places_of, rows_of
from policies.sections import Pool
from workers.protocol import LaneReport, WorkerReport

NEVER_S = float("-inf")


class Sight:
    """What is seen of workers, and until when that is right but for those that are renewed."""

    def __init__(self, workers: Sequence[WorkerView] = (), until_s: float = NEVER_S) -> None:
        self.until_s = until_s
        self.workers = tuple(workers)
        self.rows = rows_of(workers)
        self._at = {worker.worker_id: at for at, worker in enumerate(workers)}
        self.places = places_of(self.rows)
        self._lanes: dict[str, list[tuple[tuple[str, str], int, int]]] = {
            name: [] for name in self._at
        }
        """Where in `rows` the lanes of a worker stand, and which of its lanes that is."""
        for asked, rows in self.rows.items():
            for place, row in enumerate(rows):
                name = row[4].worker_id
                number = self.workers[self._at[name]].lane_costs.index(row)
                self._lanes[name].append((asked, place, number))

    def renew(self, changed: Sequence[WorkerView]) -> None:
        """Put these workers in place of what was seen of them, where they were seen at all."""
        workers, rows = list(self.workers), dict(self.rows)
        for worker in changed:
            at = self._at.get(worker.worker_id)
            if at is None:
                continue
            workers[at] = worker
            for asked, place, number in self._lanes[worker.worker_id]:
                renewed = list(rows[asked])
                renewed[place] = worker.lane_costs[number]
                rows[asked] = tuple(renewed)
        self.workers, self.rows = tuple(workers), rows


HEARTBEAT_INTERVAL_S = 2.0
"""How often a worker is asked to beat."""
NOBODY: frozenset[str] = frozenset()
# This gateway did not listen for so long: what seems to have failed then proves nothing.
_DEAF_S = 1.0
_UNHEARD = frozenset((AttemptResult.TIMED_OUT, AttemptResult.UNREACHABLE))


class WorkerRegistry:
    """Workers by id. `clock` is monotonic; one event loop owns the table, so nothing is locked.

    `jitter` gives numbers in [0, 1): ejected workers do not all come back at the same moment.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        known_models: frozenset[str] = NOBODY,
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._members: dict[str, WorkerState] = {}
        self._known_models = known_models
        self._cordoned = NOBODY
        self._deaf_until_s = float("-inf")
        self._listened_at_s: float | None = None
        self._sight = Sight()
        self._changed: set[WorkerState] = set()
        """Since the last look."""

    def heartbeat(self, report: WorkerReport, listed: ListedWorker | None = None) -> None:
        """Take in a heartbeat; raise `WorkerIdTaken` when another live worker holds the id."""
        now_s = self._clock()
        member = self._members.get(report.worker_id)
        if member is not None and member.report.boot_id == report.boot_id:
            before = member.report
            member.update(report, now_s)
            member.heartbeat_at_s = now_s
            member.local = True
            if serves_alike(before, report):
                self._changed.add(member)
            else:
                self._sight.until_s = NEVER_S
        elif member is None or member.report.url == report.url or not member.is_live(now_s):
            # A new boot starts with no requests and with a clean record; what runs on the old one
            # still counts on the old entry.
            cordoned = report.worker_id in self._cordoned
            self._members[report.worker_id] = WorkerState(report, now_s, listed, cordoned=cordoned)
            self._sight.until_s = NEVER_S
        else:
            raise WorkerIdTaken
        member = self._members[report.worker_id]
        member.local_heartbeat_at_s = now_s
        self._known_models |= {*member.models}

    def merge_remote(self, report: WorkerReport, age_s: float) -> bool:
        """Take in a heartbeat that another gateway got so long ago; say whether it is news."""
        now_s = self._clock()
        beaten_at_s = now_s - age_s
        member = self._members.get(report.worker_id)
        if age_s > HEARTBEAT_TIMEOUT_S or (
            member is not None and beaten_at_s <= member.heartbeat_at_s
        ):
            return False
        if member is None or (member.listed is None and member.report.boot_id != report.boot_id):
            if member is not None and member.report.url != report.url and member.is_live(now_s):
                return False  # two workers of one id: who was first here stays
            cordoned = report.worker_id in self._cordoned
            self._members[report.worker_id] = WorkerState(
                report, beaten_at_s, cordoned=cordoned, local=False
            )
        elif member.listed is None:
            member.update(report, now_s)
            member.heartbeat_at_s = beaten_at_s
        self._sight.until_s = NEVER_S
        self._known_models |= {*self._members[report.worker_id].models}
        return True

    def probe_succeeded(self, report: WorkerReport) -> None:
        """Take the answer of a worker that beats elsewhere for a heartbeat."""
        if self.merge_remote(report, 0.0):
            self._members[report.worker_id].local_heartbeat_at_s = self._clock()

    def update_report(self, report: WorkerReport) -> None:
        """Take in what a worker said when it was asked; that is no heartbeat."""
        member = self._members.get(report.worker_id)
        if member is not None and member.report.boot_id == report.boot_id:
            member.update(report, self._clock())
            self._sight.until_s = NEVER_S

    def compensate_stall(self, deaf_s: float) -> None:
        """Take off everybody's silence the time in which this gateway itself did not listen.

        To be called several times a second; once it is, its own absence tells of deafness too.
        """
        self._listened_at_s = self._clock()
        if deaf_s >= _DEAF_S:
            self._deaf_until_s = self._listened_at_s + _DEAF_S
            for member in self._members.values():
                member.heartbeat_at_s += deaf_s
            self._sight.until_s = NEVER_S

    def set_cordoned(self, worker_ids: frozenset[str]) -> None:
        """Send nothing new to these workers, also in later boots, and to all others again."""
        self._cordoned = worker_ids
        for worker_id, member in self._members.items():
            member.cordoned = worker_id in worker_ids
        self._sight.until_s = NEVER_S

    def remove(self, worker_id: str) -> None:
        """Forget a worker that said goodbye."""
        self._members.pop(worker_id, None)
        self._sight.until_s = NEVER_S

    def acquire(self, candidate: Candidate) -> Lease | None:
        """Take a slot of this lane, or None where none is free now."""
        now_s = self._clock()
        member = self._members.get(candidate.worker_id)
        if member is None or not self._has_room(member, candidate.lane, now_s):
            return None
        lane, read_s = candidate.lane, candidate.prefill_s
        in_flight = member.in_flight[lane] = member.in_flight.get(lane, 0) + 1
        if in_flight > member.peak_in_flight.get(lane, 0):
            member.peak_in_flight[lane] = in_flight
        if read_s:
            member.pending_prefill_s += read_s
            member.prefill_until_s = max(member.prefill_until_s, now_s) + read_s
        member.invalidate_view()
        self._changed.add(member)
        breaker = member.breaker
        on_probation = breaker.probation_limit is not None
        member.probation_requests += on_probation
        return Lease(candidate, member, breaker.ejected_at_s, on_probation)

    def release(self, lease: Lease, result: AttemptResult, retry_after_s: float = 0.0) -> None:
        """Free the slot, and hold what happened against the worker."""
        now_s = self._clock()
        candidate, member = lease.candidate, lease.state
        before = member.breaker
        member.in_flight[candidate.lane] -= 1
        member.pending_prefill_s -= candidate.prefill_s
        member.prefill_until_s = min(member.prefill_until_s, now_s + member.pending_prefill_s)
        member.invalidate_view()
        self._changed.add(member)
        if result is AttemptResult.SUCCEEDED:
            member.answered_at_s = now_s
            if before is HEALTHY:
                return
        if lease.ejected_at_s != before.ejected_at_s:
            return  # it was sent before the last ejection, and that has been judged
        if before.probation_limit is not None:
            member.probation_requests -= 1
        if result is AttemptResult.SUCCEEDED:
            member.breaker = before.record_success(now_s, max(member.slots.values(), default=1))
        elif result is AttemptResult.BUSY:
            member.breaker = before.record_busy(now_s, retry_after_s)
        elif result is AttemptResult.FAILED or (result in _UNHEARD and not self._deaf(now_s)):
            last = self._is_last(member, now_s)
            member.breaker = before.record_failure(now_s, result, last=last, jitter=self._jitter())
        if member.breaker.ejected_at_s != before.ejected_at_s:
            member.probation_requests = 0
        if member.breaker is not before:
            self._sight.until_s = NEVER_S

    def workers(self) -> tuple[WorkerState, ...]:
        """List the live workers, also those that take nothing now."""
        self._expire(self._clock())
        return tuple(self._members.values())

    def pool_lanes(self, name: str, pool: Pool) -> tuple[tuple[WorkerState, LaneReport], ...]:
        """List the lanes of a pool over all live workers."""
        return tuple(
            (member, lane)
            for member in self.workers()
            if pool.takes(member.report.labels, member.models)
            for lane in member.report.lanes
            if lane.name == name or lane.name in pool.lanes
        )

    def view(self, without: frozenset[str] = NOBODY) -> FleetView:
        """Take an immutable snapshot for decisions, leaving these workers out."""
        now_s = self._clock()
        if now_s >= self._sight.until_s:
            self._look(now_s)
        elif self._changed:
            members = self._members
            self._sight.renew([
                member.view()
                for member in self._changed
                if members.get(member.report.worker_id) is member
            ])  # fmt: skip
            self._changed.clear()
        sight = self._sight
        if without:
            left = tuple([one for one in sight.workers if one.worker_id not in without])
            return FleetView.of(left, self._known_models, now_s)
        return FleetView(sight.workers, self._known_models, sight.rows, sight.places, now_s)

    def _look(self, now_s: float) -> None:
        """Look at everybody anew, and find out how long that is good for."""
        self._expire(now_s)
        members = self._members.values()
        # What time alone changes: whoever is silent for too long is out, and who was left alone
        # for a while is not any more.
        ends_s = [member.heartbeat_at_s + HEARTBEAT_TIMEOUT_S for member in members]
        opens_s = [at_s for member in members if (at_s := member.breaker.available_at_s) > now_s]
        self._sight = Sight(
            [member.view() for member in members if self._open(member, now_s)],
            until_s=min((*ends_s, *opens_s), default=NEVER_S),
        )
        self._changed.clear()

    def is_available(self, member: WorkerState) -> bool:
        """Say whether a worker gets new requests now."""
        return self._open(member, self._clock())

    def available_in_s(self, model: str) -> float | None:
        """Tell when the first worker of a model that is left alone now gets requests again."""
        now_s = self._clock()
        waits_s = [
            member.breaker.available_at_s - now_s
            for member in self._members.values()
            if member.accepting and model in member.models
        ]
        return min((wait_s for wait_s in waits_s if wait_s > 0), default=None)

    def local_requests(self, worker_id: str) -> int:
        """Count the requests that a worker has now."""
        member = self._members.get(worker_id)
        return 0 if member is None else member.in_flight.total()

    def total_requests(self, worker_id: str) -> int:
        """Count those of other gateways too, as of the worker's last report."""
        member = self._members.get(worker_id)
        return (
            0 if member is None else member.in_flight.total() + sum(member.remote_requests.values())
        )

    def heartbeat_age_s(self, member: WorkerState) -> float:
        """Tell how long ago a worker beat last."""
        return self._clock() - member.heartbeat_at_s

    def ejected_for_s(self, member: WorkerState) -> float:
        """Tell how long a worker is still left alone for what it did; 0 when it is not."""
        return max(0.0, member.breaker.ejected_until_s - self._clock())

    def busy_for_s(self, member: WorkerState) -> float:
        """Tell how long a worker is still left alone because it asked for that."""
        return max(0.0, member.breaker.busy_until_s - self._clock())

    def _open(self, member: WorkerState, now_s: float) -> bool:
        breaker = member.breaker
        if not member.accepting or breaker.is_busy(now_s):
            return False
        # An ejected one is better than none: the last worker of a model is never left alone.
        return not breaker.is_ejected(now_s) or self._is_last(member, now_s)

    def _has_room(self, member: WorkerState, lane: str, now_s: float) -> bool:
        slots = member.slots.get(lane, 0)
        if member.occupied(lane) >= slots or member.cordoned:
            return False
        breaker = member.breaker
        if breaker is HEALTHY:
            return True
        at_a_time = breaker.probation_limit
        return self._open(member, now_s) and (
            at_a_time is None
            or member.probation_requests < at_a_time
            or self._is_last(member, now_s)
        )

    def _is_last(self, member: WorkerState, now_s: float) -> bool:
        """Say whether no other worker of its model can be asked now."""
        return not any(
            other is not member
            and other.accepting
            and not set(member.models).isdisjoint(other.models)
            and now_s >= other.breaker.available_at_s
            for other in self._members.values()
        )

    def _deaf(self, now_s: float) -> bool:
        """Say whether this gateway does not listen, or has only just begun to again."""
        listened_at_s = now_s if self._listened_at_s is None else self._listened_at_s
        return now_s < self._deaf_until_s or now_s - listened_at_s > _DEAF_S

    def _expire(self, now_s: float) -> None:
        if not self._deaf(now_s):
            live = {name: one for name, one in self._members.items() if one.is_live(now_s)}
            self._members = live
