"""Counters, and the last report of every boot of every worker.

The operations are few, and Redis can do each one in one step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping

from pydantic import ValidationError

from paceline.protocol import EARLIER_BOOTS, LaneReport, WorkerReport

CounterKey = tuple[str, ...]
"""The name of a counter, from general to special: ("decisions", "vlm", "pictures", "media")."""

TakePending = Callable[[], Mapping[CounterKey, int]]
"""Returns the counts of this gateway since the last call."""

MAX_BOOTS = 16
"""The boots of one worker that are counted apart; older ones are folded: added to one report."""
MAX_WORKERS = 256
"""The workers that may join, and that are counted apart."""
MAX_MODELS = 64
"""The models of a worker's earlier boots that are counted apart."""
GONE_WORKERS = "gone-workers"
OTHER_MODELS = "other-models"
_FOLDED_KNOWN = 1024


class MemoryCounters:
    """The counters and reports of one gateway, in memory."""

    def __init__(self, take_pending: TakePending = dict) -> None:
        self._take_pending = take_pending
        self._counts: Counter[CounterKey] = Counter()
        self._boots: dict[str, dict[str, WorkerReport]] = {}
        self._workers: dict[str, None] = {}
        """The worker with the latest report is the last one."""
        self._folded: deque[tuple[str, str]] = deque(maxlen=_FOLDED_KNOWN)

    async def counts(self) -> Mapping[CounterKey, int]:
        """Return all counters."""
        self._counts.update(self._take_pending())
        return dict(self._counts)

    async def store_report(self, report: WorkerReport) -> None:
        """Store a report unless a later one of that boot is stored."""
        if (report.worker_id, report.boot_id) in self._folded:
            return  # late: the sum of earlier boots includes it
        worker_id = report.worker_id
        boots = self._boots.setdefault(worker_id, {})
        kept = boots.get(report.boot_id)
        # A heartbeat may overtake the response to a probe.
        if kept is None or progress(report) >= progress(kept):
            boots[report.boot_id] = report
        # A crash loop must not fill memory, nor must invented names of workers and models.
        unfolded = [boot for boot in boots if not boot.startswith(EARLIER_BOOTS)]
        if len(unfolded) > MAX_BOOTS:
            self._fold(worker_id, unfolded[0], worker_id)
        self._workers.pop(worker_id, None)
        self._workers[worker_id] = None
        if len(self._workers) > MAX_WORKERS:
            gone = next(iter(self._workers))
            del self._workers[gone]
            for boot in tuple(self._boots[gone]):
                self._fold(gone, boot, GONE_WORKERS)
            del self._boots[gone]

    def _fold(self, worker_id: str, boot_id: str, into: str) -> None:
        """Add a boot to the sum of earlier boots of a worker."""
        report = self._boots[worker_id].pop(boot_id)
        boots = self._boots.setdefault(into, {})
        name = sum_name(report, boots)
        summed = sum_reports(boots.pop(name, None), report, name, into)
        # Put first, so that the order stays the order of boots.
        self._boots[into] = {name: summed, **boots}
        self._folded.append((worker_id, boot_id))

    async def reports(self) -> tuple[WorkerReport, ...]:
        """Return the last report of every boot, also of workers that are gone."""
        return tuple(report for boots in self._boots.values() for report in boots.values())


def progress(report: WorkerReport) -> int:
    """Return a number that grows with each report of a boot."""
    return sum(
        lane.requests
        + lane.prompt_tokens
        + lane.completion_tokens
        + lane.speculation.steps
        + lane.speculation.drafted
        + lane.prefix.hits
        + lane.prefix.misses
        + lane.spec_prefill.scored_tokens
        + sum(lane.spec_prefill.full_prefills.values())
        + sum(lane.bypass_counts.values())
        for lane in report.lanes
    )


def sum_name(report: WorkerReport, boot_ids: Collection[str]) -> str:
    """Return the boot id of the sum that a boot belongs to, given those of its worker."""
    name = f"{EARLIER_BOOTS}{report.model}"
    sums = [boot_id for boot_id in boot_ids if boot_id.startswith(EARLIER_BOOTS)]
    return name if name in sums or len(sums) < MAX_MODELS else f"{EARLIER_BOOTS}{OTHER_MODELS}"


def sum_reports(
    earlier: WorkerReport | None, report: WorkerReport, name: str, worker_id: str
) -> WorkerReport:
    """Return the sum of earlier boots and another one, under this boot id of this worker.

    A sum beyond the bounds of a report, which no true reports have, leaves out the other boot.
    """
    lanes = report.lanes if earlier is None else sum_lanes((*earlier.lanes, *report.lanes))
    past = {"boot_id": name, "lanes": lanes, "ready": False, "start": None, "prefixes": ()}
    past |= {"worker_id": worker_id, "model": name.removeprefix(EARLIER_BOOTS)}
    summed = report.model_copy(update=past)
    try:
        return WorkerReport.model_validate(summed.model_dump())
    except ValidationError:
        if earlier is None:
            raise
        return earlier


def sum_lanes(lanes: Iterable[LaneReport]) -> tuple[LaneReport, ...]:
    """Return sums of lanes by name; fields that are no counters come from the last one."""
    sums: dict[str, LaneReport] = {}
    for lane in lanes:
        sums[lane.name] = sums[lane.name] + lane if lane.name in sums else lane
    return tuple(sums.values())
