"""The values that pass from step to step: inspect -> decide -> forward -> account.

All are tuples: each is made for every request, and a frozen dataclass takes three times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from gateway.weighing import FULL, UNMEASURED, Pace, strain_s
from policies.asker import SOMEBODY, Asker
from policies.document import PolicyDocument, Priority
from policies.profile import Bypass, RequestProfile
from workers.adapters.report import LaneReport

Holding = tuple[str, str]
"""A worker by id and boot: what it keeps in memory ends with its life."""
NOWHERE = "none"
"""The pool of a request that reached none."""
Header = tuple[bytes, bytes]
"""As ASGI has it: the name in lower case, and the value."""
Headers = list[Header]


def fits_header(secret: str) -> bool:
    """Say whether a header can hold it; what cannot be sent would stand in the log as an error."""
    return secret.isascii() and secret.isprintable() and secret == secret.strip()


class Inspected(NamedTuple):
    """A request that was read and found good."""

    asked_model: str
    """The name that the client used."""
    profile: RequestProfile
    """Its `model` is the resolved one."""
    body: Mapping[str, Any]
    """What a worker gets: normalised messages, effective sampling, no nulls."""


class Caller(NamedTuple):
    """Who asks, for as far as waiting is concerned."""

    client: str = "anonymous"
    """Those who share it share one place in a waiting line."""
    priority: Priority = Priority.DEFAULT
    key: str = ""
    team: str = ""
    pools: frozenset[str] | None = None
    """Those that the key may use; None: all."""


class Case(NamedTuple):
    """What one request is decided by to its end; a policy that comes later is for later ones."""

    policy: PolicyDocument
    profile: RequestProfile
    asker: Asker = SOMEBODY
    pools: frozenset[str] | None = None
    """Those that the asker may use; None: all."""
    prefix: str = ""
    """The name of its system prompt; empty where there is none worth looking for."""


class LaneView(NamedTuple):
    """One lane of one worker as routing sees it."""

    name: str
    in_flight: int
    """Sent by this gateway and not yet answered; counted at dispatch, not from reports."""
    slots: int
    load: float
    """Busy rows over all rows; above 1 something waits."""
    drafts: bool
    """It has an MTP head that is on and healthy."""
    pays: bool
    """Drafting is worth it in the batch that one more request would be part of."""
    rows: int
    """Busy ones, those of other gateways too."""
    report: LaneReport

    @classmethod
    def of(cls, report: LaneReport, in_flight: int, of_others: int = 0) -> Self:
        """Look at a lane that has so many requests now, beside those of other gateways."""
        rows = in_flight + of_others
        return cls(
            report.name,
            in_flight,
            report.slots,
            rows / max(1, report.slots),
            report.mtp_enabled and report.head_healthy,
            report.drafting_pays(rows + 1),
            rows,
            report,
        )


class Seat(NamedTuple):
    """One lane of one worker, with what decisions ask of the worker."""

    worker_id: str
    boot_id: str
    labels: tuple[str, ...]
    models: tuple[str, ...]
    lane: LaneView


Row = tuple[float, float, float, float, Seat]
"""What a decision looks at of all lanes there are, and therefore a plain tuple: what one more
request costs there beside its own reading, until when the worker reads what it has, how long it
reads a token, when it answered last (all in seconds), and the seat."""
Rows = Mapping[tuple[str, str], tuple[Row, ...]]
"""By model and lane."""
Places = Mapping[tuple[str, str], Mapping[str, int]]
"""The same by worker: which of the rows is its own."""


class WorkerView(NamedTuple):
    """One worker that takes requests now."""

    worker_id: str
    models: tuple[str, ...]
    lanes: tuple[LaneView, ...]
    rows: tuple[Row, ...]
    """One for each lane."""
    labels: tuple[str, ...] = ()
    boot_id: str = ""

    @classmethod
    def of(
        cls,
        worker_id: str,
        models: tuple[str, ...],
        lanes: tuple[LaneView, ...],
        labels: tuple[str, ...] = (),
        boot_id: str = "",
        *,
        pace: Pace = UNMEASURED,
        reads_until_s: float = 0.0,
        heard_s: float = 0.0,
    ) -> Self:
        """Look at a worker of these lanes: they share one machine."""
        busy = 0
        for lane in lanes:
            busy += lane.rows
        rows = [
            (
                strain_s(
                    pace,
                    lane.report,
                    lane.rows if lane.in_flight < lane.slots else lane.rows * FULL,
                    busy - lane.rows,
                    pays=lane.pays,
                )
                if busy or not lane.pays
                else pace.crowded_s,
                reads_until_s,
                pace.read_s,
                heard_s,
                Seat(worker_id, boot_id, labels, models, lane),
            )
            for lane in lanes
        ]
        return cls(worker_id, models, lanes, tuple(rows), labels, boot_id)

    def at(self, reads_until_s: float, heard_s: float) -> WorkerView:
        """Give the same worker with as many requests, at another moment."""
        worker_id, models, lanes, before, labels, boot_id = self
        rows = [
            (cost_s, reads_until_s, read_s, heard_s, seat) for cost_s, _, read_s, _, seat in before
        ]
        return WorkerView(worker_id, models, lanes, tuple(rows), labels, boot_id)


class FleetView(NamedTuple):
    """The fleet at one moment, for decisions. Make it with `of`."""

    workers: tuple[WorkerView, ...]
    """Those that take requests now."""
    known_models: frozenset[str]
    """All that were ever served here: a model whose only worker restarts is not unknown."""
    rows: Rows
    places: Places
    now_s: float = 0.0
    """The moment, on the clock by which workers read and are heard."""
    holders: frozenset[Holding] = frozenset()
    """Those that hold the system prompt of the request that is to be decided."""
    shared_tokens: int = 0
    """What they need not read of it; 0 where no worker has counted it yet."""

    @classmethod
    def of(
        cls, workers: tuple[WorkerView, ...], known_models: frozenset[str], now_s: float = 0.0
    ) -> Self:
        """Look at these workers."""
        rows = rows_of(workers)
        return cls(workers, known_models, rows, places_of(rows), now_s)

    @property
    def served_models(self) -> frozenset[str]:
        """Name the models that can answer now."""
        return frozenset([model for model, _ in self.rows])


def rows_of(workers: Iterable[WorkerView]) -> Rows:
    """Sort the lanes of workers by what they are asked for."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for worker in workers:
        for model in worker.models:
            for row in worker.rows:
                rows.setdefault((model, row[4].lane.name), []).append(row)
    return {asked: tuple(found) for asked, found in rows.items()}


def places_of(rows: Rows) -> Places:
    """Tell where among the rows each worker stands; that changes only with who is there."""
    return {
        asked: {row[4].worker_id: place for place, row in enumerate(found)}
        for asked, found in rows.items()
    }


class Candidate(NamedTuple):
    """One lane that may take the request, and why it would be that one."""

    pool: str
    lane: str
    worker_id: str
    reason: str
    load: float
    spill: bool = False
    """Only once the request has waited for those before, as long as the route says."""
    holder: bool = False
    """It holds the system prompt of the request."""
    score_s: float = 0.0
    """What the request would cost there, in seconds: the least comes first."""
    read_s: float = 0.0
    """Of these, the reading of what the worker does not hold."""
    explored: bool = False
    """First because nobody has heard of it for a while, not because it costs least."""


class Decision(NamedTuple):
    """Who may take a request, best first; nobody when `candidates` is empty."""

    route: str
    bypass: tuple[Bypass, ...]
    candidates: tuple[Candidate, ...]
    spill_after_s: float | None = None
    """None: it never spills."""
    barred: bool = False
    """The key may use none of the route's pools."""
    whole: bool = True
    """All are named who may take it; otherwise the best few."""
