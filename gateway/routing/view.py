"""Snapshots of the fleet for routing decisions: workers, lanes, and the cost terms of each lane.

A snapshot is a value that no code changes. Its classes are not frozen, because each request makes
and reads some: a frozen dataclass takes four times as long to make, a named tuple twice as long to
read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Self

from gateway.routing.features import Feature
from gateway.routing.load_cost import (
    FULL_LANE_FACTOR,
    UNMEASURED,
    Throughput,
    draft_loss_share,
    load_cost_s,
)
from gateway.routing.prefix_keys import PrefixEnd
from gateway.types import WorkerBoot
from paceline.protocol import POOLING_LANES, LaneReport
from paceline.request.profile import GENERATING, Endpoint, Sampling


@dataclass(slots=True)
class LaneView:
    """Snapshot of one lane of one worker."""

    name: str
    in_flight: int
    """Requests of this gateway, counted at dispatch and not taken from reports."""
    slots: int
    load: float
    """Busy rows over all rows; above 1 requests wait in the worker."""
    can_draft: bool
    """The lane drafts, and its MTP head, if it has one, is healthy."""
    drafting_pays: bool
    """Drafting is faster in the batch that one more request would join."""
    busy_rows: int
    """Rows in use, those of other gateways included."""
    report: LaneReport

    @classmethod
    def of(cls, report: LaneReport, in_flight: int, remote_requests: int = 0) -> Self:
        """Return the view of a lane that has `in_flight` requests of this gateway."""
        rows = in_flight + remote_requests
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


TAKES_ALL: frozenset[Feature] = frozenset()


class ModelView(NamedTuple):
    """How one model of an engine differs from the model of a worker of Paceline."""

    lacks: frozenset[Feature] = TAKES_ALL
    """Features whose requests the engine does not take for it."""
    load_s: float = 0.0
    """Time that the engine needs to load it first; 0 if it is in memory."""


@dataclass(slots=True)
class LaneRef:
    """One lane together with the properties of its worker that decisions read."""

    worker_id: str
    boot_id: str
    labels: tuple[str, ...]
    models: tuple[str, ...]
    lane: LaneView
    lacks: frozenset[Feature] = TAKES_ALL
    """Features whose requests the worker does not take for this model."""


@dataclass(slots=True)
class LaneCost:
    """Cost terms of one lane, in seconds."""

    ref: LaneRef
    load_cost_s: float
    """Delay by the requests that the worker has, and the delay that one more causes them."""
    prefill_token_s: float
    """Prefill time of one prompt token."""
    prefill_until_s: float = 0.0
    """Time at which the worker finishes the prefill of the prompts that it has."""
    answered_at_s: float = 0.0
    """Time of the last answer."""


class LaneGroup(NamedTuple):
    """The lanes of one name that serve one model."""

    costs: tuple[LaneCost, ...] = ()
    positions: Mapping[str, int] | None = None
    """The index of each worker, by id; None for a selection or union of such groups."""


NO_MODELS: Mapping[str, ModelView] = MappingProxyType({})
LaneKey = tuple[str, str]
"""Model and name of a lane."""


@dataclass(slots=True)
class WorkerView:
    """Snapshot of one worker that accepts requests."""

    worker_id: str
    models: tuple[str, ...]
    lane_costs: tuple[LaneCost, ...]
    """One for each lane, in the order of the report."""
    by_model: Mapping[str, ModelView] = field(default_factory=lambda: NO_MODELS)
    """The models of an engine that differ."""
    tells_system: bool = False
    """Whether the worker says where its template takes system messages."""

    @classmethod
    def of(
        cls,
        worker_id: str,
        models: tuple[str, ...],
        lanes: Sequence[LaneView],
        labels: tuple[str, ...] = (),
        boot_id: str = "",
        *,
        throughput: Throughput = UNMEASURED,
        by_model: Mapping[str, ModelView] = NO_MODELS,
        tells_system: bool = False,
    ) -> Self:
        """Return the view of a worker; its lanes share one machine."""
        busy_rows = sum([lane.busy_rows for lane in lanes])
        costs = [
            LaneCost(
                ref=LaneRef(worker_id, boot_id, labels, models, lane),
                load_cost_s=load_cost_s(
                    throughput,
                    lane.report,
                    lane.busy_rows * (1 if lane.in_flight < lane.slots else FULL_LANE_FACTOR),
                    busy_rows - lane.busy_rows,
                    draft_loss_share=draft_loss_share(lane.report, lane.busy_rows + 1),
                ),
                prefill_token_s=throughput.prefill_token_s,
            )
            for lane in lanes
        ]
        return cls(worker_id, models, tuple(costs), by_model, tells_system)

    def costs_of(self, model: str) -> tuple[LaneCost, ...]:
        """Return the cost terms of each lane for one of the models."""
        view = self.by_model.get(model)
        if view is None:
            return self.lane_costs
        return tuple(
            [
                replace(
                    cost,
                    ref=replace(cost.ref, lacks=view.lacks),
                    load_cost_s=cost.load_cost_s + view.load_s,
                )
                for cost in self.lane_costs
            ]
        )

    def at_time(self, prefill_until_s: float, answered_at_s: float) -> WorkerView:
        """Return a view with the same requests and these times."""
        costs = [
            LaneCost(
                cost.ref, cost.load_cost_s, cost.prefill_token_s, prefill_until_s, answered_at_s
            )
            for cost in self.lane_costs
        ]
        return WorkerView(
            self.worker_id, self.models, tuple(costs), self.by_model, self.tells_system
        )


class CachedPrefix(NamedTuple):
    """The longest beginning of a request's prompt that a worker has cached, as far as is known."""

    tokens: int
    """Tokens that the worker need not read."""
    end: PrefixEnd
    is_system: bool
    """Whether it is the system prompt alone, which other conversations share."""
    measured: bool = True
    """Whether the worker has counted the tokens; else they are an estimate."""


CachedPrefixes = Mapping[WorkerBoot, CachedPrefix]


NOTHING_CACHED: CachedPrefixes = MappingProxyType({})


@dataclass(slots=True)
class FleetView:
    """Snapshot of the fleet for decisions. Construct it with `of`."""

    workers: Mapping[str, WorkerView]
    """Workers that accept requests, by id."""
    known_models: frozenset[str]
    """Models that this gateway has seen served: a restart does not make a model unknown."""
    lanes: Mapping[LaneKey, LaneGroup]
    sampling: Mapping[str, Sampling]
    """Model -> what its workers report as its defaults."""
    takes_all: bool
    """No worker lacks a feature, so that decisions need not compute those of a request."""
    untold: frozenset[str]
    """Models of which some worker does not say where its template takes system messages."""

    @classmethod
    def of(
        cls,
        workers: Iterable[WorkerView],
        known_models: frozenset[str],
        sampling: Mapping[str, Sampling] = MappingProxyType({}),
    ) -> Self:
        """Return the view of these workers."""
        by_id = {worker.worker_id: worker for worker in workers}
        grouped: defaultdict[LaneKey, list[LaneCost]] = defaultdict(list)
        for worker in by_id.values():
            for model in worker.models:
                for cost in worker.costs_of(model):
                    grouped[model, cost.ref.lane.name].append(cost)
        lanes = {
            key: LaneGroup(tuple(costs), {one.ref.worker_id: at for at, one in enumerate(costs)})
            for key, costs in grouped.items()
        }
        takes_all = not any(
            view.lacks for worker in by_id.values() for view in worker.by_model.values()
        )
        untold = {model for one in by_id.values() if not one.tells_system for model in one.models}
        return cls(by_id, known_models, lanes, sampling, takes_all, frozenset(untold))

    def with_changed(self, changed: Iterable[WorkerView]) -> FleetView:
        """Return a snapshot in which these workers have changed, but not their models and lanes."""
        workers, lanes = dict(self.workers), dict(self.lanes)
        for view in changed:
            if view.worker_id not in workers:
                continue
            workers[view.worker_id] = view
            for model in view.models:
                for cost in view.costs_of(model):
                    key = model, cost.ref.lane.name
                    costs, positions = lanes[key]
                    assert positions is not None, "only selections have none"
                    at = positions[view.worker_id]
                    lanes[key] = LaneGroup((*costs[:at], cost, *costs[at + 1 :]), positions)
        return replace(self, workers=workers, lanes=lanes)

    @property
    def served_models(self) -> frozenset[str]:
        """Return the models that a worker serves now."""
        return frozenset([model for model, _ in self.lanes])

    def takes(self, model: str, feature: Feature) -> bool:
        """Return whether a lane takes such chats for a model, or no lane serves it now."""
        if self.takes_all:
            return True
        costs = [
            cost
            for (served, lane), group in self.lanes.items()
            if served == model and lane not in POOLING_LANES
            for cost in group.costs
        ]
        return not costs or any(feature not in cost.ref.lacks for cost in costs)

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
