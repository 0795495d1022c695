"""Gateways' counts of the answers of engines that send no reports, as reports.

The counters are among those that gateways share. Unreported numbers are counted too, so that
readers show them as unknown and not as zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import ValidationError

from gateway.state.counters import CounterKey
from paceline.protocol import (
    MAX_DRAFT_TOKENS,
    LaneReport,
    PrefixCounts,
    Speculation,
    WorkerReport,
)

FAMILY = "engine"
REQUESTS, PROMPT, COMPLETION, CACHED = "requests", "prompt", "completion", "cached"
STEPS, DRAFTED, ACCEPTED = "steps", "drafted", "accepted"
RESULTS = HIT, MISS = ("hit", "miss")
"""Of the prefix cache, if an engine reports them."""
UNTOLD_USAGE, UNTOLD_CACHED, UNTOLD_DRAFTS = "untold_usage", "untold_cached", "untold_drafts"
BOOT_ID = "counted-by-gateways"
_ACCEPTED_NAMES = tuple(f"accepted_{count}" for count in range(MAX_DRAFT_TOKENS + 1))
_URL = "http://localhost"


class LanePlace(NamedTuple):
    """One lane of one model of an engine."""

    worker_id: str
    model: str
    lane: str


Untold = Mapping[str, int]
"""Answers that did not report their `usage`, `cached_tokens` or `drafts`."""


def accepted_name(count: int) -> str:
    """Return the name of the counter of drafts with this number of accepted tokens."""
    return _ACCEPTED_NAMES[min(count, MAX_DRAFT_TOKENS)]


def engine_reports(counts: Mapping[CounterKey, int]) -> tuple[WorkerReport, ...]:
    """Return the gateways' counts of engines, one report for each engine and model."""
    lanes: defaultdict[tuple[str, str], list[LaneReport]] = defaultdict(list)
    for place, told in _by_place(counts).items():
        try:
            lane = _lane(place.lane, told)
        except ValidationError:  # an engine told impossible counts
            continue
        lanes[place.worker_id, place.model].append(lane)
    return tuple(
        WorkerReport(
            worker_id=worker_id,
            boot_id=BOOT_ID,
            url=_URL,
            model=model,
            context_tokens=0,
            ready=False,
            lanes=tuple(of_model),
        )
        for (worker_id, model), of_model in sorted(lanes.items())
    )


def untold_by_place(counts: Mapping[CounterKey, int]) -> dict[LanePlace, Untold]:
    """Return how many answers of each lane did not report each number."""
    return {
        place: {
            "usage": told.get(UNTOLD_USAGE, 0),
            "cached_tokens": told.get(UNTOLD_CACHED, 0),
            "drafts": told.get(UNTOLD_DRAFTS, 0),
        }
        for place, told in _by_place(counts).items()
    }


def _by_place(counts: Mapping[CounterKey, int]) -> dict[LanePlace, dict[str, int]]:
    places: defaultdict[LanePlace, dict[str, int]] = defaultdict(dict)
    for key, count in counts.items():
        match key:
            case ("engine", worker_id, model, lane, name):
                places[LanePlace(worker_id, model, lane)][name] = count
    return dict(places)


def _lane(name: str, told: Mapping[str, int]) -> LaneReport:
    histogram = [told.get(accepted, 0) for accepted in _ACCEPTED_NAMES]
    while histogram and not histogram[-1]:
        histogram.pop()
    drafted = told.get(DRAFTED, 0)
    return LaneReport(
        name=name,
        slots=0,
        mtp_enabled=drafted > 0,
        speculation=Speculation(
            steps=told.get(STEPS, 0),
            drafted=drafted,
            accepted=told.get(ACCEPTED, 0),
            histogram=tuple(histogram),
        ),
        prefix=PrefixCounts(
            hits=told.get(HIT, 0), misses=told.get(MISS, 0), cached_tokens=told.get(CACHED, 0)
        ),
        requests=told.get(REQUESTS, 0),
        prompt_tokens=told.get(PROMPT, 0),
        completion_tokens=told.get(COMPLETION, 0),
    )
