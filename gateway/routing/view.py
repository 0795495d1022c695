"""The fleet as routing decisions see it: workers, lanes, and the cost terms of each lane.

The registry updates the lanes of a worker in place and makes a new view of the fleet when other
workers become available. Nothing here is frozen or a named tuple, because each request reads and
writes some: a named tuple takes twice as long to read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self

from gateway.routing.features import Feature
from gateway.routing.load_cost import Throughput, load_cost_s
from gateway.routing.prefix_keys import PrefixEnd
from gateway.types import WorkerBoot
from paceline.protocol import MTP_LANE, POOLING_LANES, LaneReport
from paceline.request.profile import GENERATING, Bypass, Endpoint, Sampling

TAKES_ALL: frozenset[Feature] = frozenset()


class ModelView(NamedTuple):
    """How one model of an engine differs from the model of a worker of Paceline."""

    lacks: frozenset[Feature] = TAKES_ALL
    """Features whose requests the engine does not take for it."""
    load_s: float = 0.0
    """Time that the engine needs to load it first; 0 if it is in memory."""


@dataclass(slots=True)
class LaneView:
    """One lane of one worker for some of its models, with its cost terms in seconds."""

    worker_id: str
    boot_id: str
    labels: tuple[str, ...]
    models: tuple[str, ...]
    """All models of the worker."""
    report: LaneReport
    model: ModelView
    in_flight: int = 0
    """Requests of this gateway, counted at dispatch and not taken from reports."""
    busy_rows: int = 0
    """Rows in use, those of other gateways included."""
    load: float = 0.0
    """Busy rows over all rows; above 1 requests wait in the worker."""
    load_cost_s: float = 0.0
    """Delay by the requests that the worker has, and the delay that one more causes them."""
    prefill_token_s: float = 0.0
    """Prefill time of one prompt token."""
    prefill_until_s: float = 0.0
    """Time at which the worker finishes the prefill of the prompts that it has."""
    answered_at_s: float = 0.0
    """Time of the last answer."""
    can_draft: bool = False
    """Whether it drafts, and its MTP head, if it has one, is healthy."""
    capable: bool = True
    """Whether it is usable as named: a speculative one can draft."""

    @property
    def has_free_slot(self) -> bool:
        """Return whether this gateway may send it a request."""
        return self.in_flight < self.report.slots


class LaneGroup(NamedTuple):
    """The lanes of one name that serve one model."""

    lanes: tuple[LaneView, ...] = ()
    positions: Mapping[str, int] | None = None
    """The index of each worker, by id; None for a selection or union of such groups."""
    capable: bool = True
    """Whether one of the lanes is usable as named, as far as is known."""


NO_MODELS: Mapping[str, ModelView] = MappingProxyType({})
_ALIKE = ModelView()
LaneKey = tuple[str, str]
"""Model and name of a lane."""


@dataclass(slots=True)
class WorkerView:
    """One worker that accepts requests."""

    worker_id: str
    models: tuple[str, ...]
    lanes: tuple[LaneView, ...]
    """In the order of the report, once for all models that do not differ and for each other one."""
    by_model: Mapping[str, ModelView] = field(default_factory=lambda: NO_MODELS)
    """The models of an engine that differ."""
    tells_system: bool = False
    """Whether the worker says where its template takes system messages."""

    @classmethod
    def of(
        cls,
        worker_id: str,
        models: tuple[str, ...],
        reports: Sequence[LaneReport],
        labels: tuple[str, ...] = (),
        boot_id: str = "",
        *,
        by_model: Mapping[str, ModelView] = NO_MODELS,
        tells_system: bool = False,
    ) -> Self:
        """Return the view of a worker, whose lanes are to be updated."""
        lanes = [
            LaneView(worker_id, boot_id, labels, models, report, model)
            for model in dict.fromkeys((_ALIKE, *by_model.values()))
            for report in reports
        ]
        return cls(worker_id, models, tuple(lanes), by_model, tells_system)

    def update(
        self,
        reports: Sequence[LaneReport],
        in_flight: Callable[[str], int],
        *,
        remote_requests: Mapping[str, int],
        throughput: Throughput,
        prefill_until_s: float,
        answered_at_s: float,
    ) -> None:
        """Set the reports and loads of the lanes, which share one machine."""
        rows = {one.name: in_flight(one.name) + remote_requests.get(one.name, 0) for one in reports}
        all_rows = sum(rows.values())
        for index, lane in enumerate(self.lanes):
            lane.report = report = reports[index % len(reports)]
            lane.can_draft = report.mtp_enabled and report.head_healthy
            lane.capable = lane.can_draft or report.name != MTP_LANE
            lane.in_flight = in_flight(report.name)
            lane.busy_rows = busy = rows[report.name]
            lane.load = busy / max(1, report.slots)
            lane.load_cost_s = lane.model.load_s + load_cost_s(
                throughput, report, busy, all_rows - busy, full=not lane.has_free_slot
            )
            lane.prefill_token_s = throughput.prefill_token_s
            lane.prefill_until_s = prefill_until_s
            lane.answered_at_s = answered_at_s


class CachedPrefix(NamedTuple):
    """The longest beginning of a request's prompt that a worker has cached, as far as is known."""

    tokens: int
    """Tokens that the worker need not read."""
    end: PrefixEnd
    is_system: bool
    """Whether it is only the system prompt, which other conversations share."""
    measured: bool = True
    """Whether the worker has counted the tokens; else they are an estimate."""


CachedPrefixes = Mapping[WorkerBoot, CachedPrefix]


NOTHING_CACHED: CachedPrefixes = MappingProxyType({})


@dataclass(slots=True)
class FleetView:
    """The fleet for decisions. Construct it with `of`."""

    workers: Mapping[str, WorkerView]
    """Workers that accept requests, by id."""
    known_models: frozenset[str]
    """Models that this gateway has seen served: a restart does not make a model unknown."""
    lanes: Mapping[LaneKey, LaneGroup]
    sampling: Mapping[str, Sampling]
    """Model -> the defaults that its workers report."""
    takes_all: bool
    """No worker lacks a feature, so that decisions need not compute those of a request."""
    untold: frozenset[str]
    """Models with a worker that does not say where its template accepts system messages."""
    bypass: Mapping[str, tuple[Bypass, ...]]
    """Model -> why no worker can speculate; empty if one can."""

    @classmethod
    def of(
        cls,
        workers: Iterable[WorkerView],
        known_models: frozenset[str],
        sampling: Mapping[str, Sampling] = MappingProxyType({}),
    ) -> Self:
        """Return the view of these workers."""
        by_id = {worker.worker_id: worker for worker in workers}
        grouped: defaultdict[LaneKey, list[LaneView]] = defaultdict(list)
        for worker in by_id.values():
            for model in worker.models:
                view = worker.by_model.get(model, _ALIKE)
                for lane in worker.lanes:
                    if lane.model == view:
                        grouped[model, lane.report.name].append(lane)
        lanes = {
            key: LaneGroup(
                tuple(group),
                {one.worker_id: at for at, one in enumerate(group)},
                any(lane.capable for lane in group),
            )
            for key, group in grouped.items()
        }
        bypass = {
            model: _bypass(group) for (model, name), group in grouped.items() if name == MTP_LANE
        }
        takes_all = not any(
            view.lacks for worker in by_id.values() for view in worker.by_model.values()
        )
        untold = {model for one in by_id.values() if not one.tells_system for model in one.models}
        return cls(by_id, known_models, lanes, sampling, takes_all, frozenset(untold), bypass)

    @property
    def served_models(self) -> frozenset[str]:
        """Return the models that a worker serves now."""
        return frozenset([model for model, _ in self.lanes])

    def takes(self, model: str, feature: Feature) -> bool:
        """Return whether a lane takes such chats for a model, or no lane serves it now."""
        if self.takes_all:
            return True
        lanes = [
            lane
            for (served, name), group in self.lanes.items()
            if served == model and name not in POOLING_LANES
            for lane in group.lanes
        ]
        return not lanes or any(feature not in lane.model.lacks for lane in lanes)

    def models_of(self, endpoint: Endpoint) -> frozenset[str]:
        """Return the models that serve an endpoint now."""
        wanted = None if endpoint in GENERATING else endpoint
        return frozenset([model for model, lane in self.lanes if POOLING_LANES.get(lane) is wanted])

    def endpoints_of(self, model: str) -> frozenset[Endpoint]:
        """Return the endpoints that a model serves now."""
        found: set[Endpoint] = set()
        for served, lane in self.lanes:
            if served == model:
                pooling = POOLING_LANES.get(lane)
                found.update(GENERATING if pooling is None else (pooling,))
        return frozenset(found)


def _bypass(lanes: Sequence[LaneView]) -> tuple[Bypass, ...]:
    if any(lane.can_draft for lane in lanes):
        return ()
    unhealthy = any(not lane.report.head_healthy for lane in lanes)
    return (Bypass.HEAD_UNHEALTHY if unhealthy else Bypass.NO_MTP_WORKER,)
