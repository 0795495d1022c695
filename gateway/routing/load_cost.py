"""Cost of a lane for one more request, in seconds: the delay until the request's first token.

A cost includes the delay that the request causes to other requests of the worker. The terms are
computed when a worker's report or load changes; a decision adds the prefill of the request itself,
its prompt tokens times `prefill_token_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paceline.protocol import LaneReport, WorkerReport

# Speed of a mid-range Mac, for workers that have not measured theirs.
_DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
_DEFAULT_FULL_LANE_S = 2.4
"""Cost of a full lane without measurements; a row costs its share."""
_ANSWER_TOKENS = 100
_ROW_SHARE = 0.12
"""A further row makes each step longer by this share, for all rows."""
_OTHER_LANE_SHARE = 0.5
"""Weight of a row of another lane: the lanes take turns on one machine."""
_NOT_PAYING_SHARE = 0.3
"""Share of an answer's time that is lost in a batch too large for drafting, on a Mac that has not
measured its own."""
_FULL_LANE_FACTOR = 10
"""Weight of the rows of a lane without a free slot."""
# Above this share of its memory a worker evicts cached prompts and rows wait for each other.
_MEMORY_PRESSURE_SHARE = 0.8
_MEMORY_PRESSURE_S = 2.0


class Throughput(NamedTuple):
    """Speed of a worker by its last report, as seconds per unit of work."""

    prefill_token_s: float
    """Prefill of one prompt token."""
    row_s: Mapping[str, float]
    """Cost of one more row, by lane."""
    answer_s: Mapping[str, float]
    """Time of one answer, by lane; 0 without measurements."""
    memory_cost_s: float
    """Cost of memory that is nearly full."""


def throughput_of(report: WorkerReport) -> Throughput:
    """Return the speed that a worker reports."""
    rates = [lane.prefill_tokens_per_s for lane in report.lanes if lane.prefill_tokens_per_s]
    share = max(
        _share(report.memory_bytes, report.memory_limit_bytes),
        _share(report.footprint_bytes, report.footprint_limit_bytes),
    )
    pressure = max(share - _MEMORY_PRESSURE_SHARE, 0.0) / (1 - _MEMORY_PRESSURE_SHARE)
    answers_s = {
        lane.name: _ANSWER_TOKENS / lane.decode_tokens_per_s if lane.decode_tokens_per_s else 0.0
        for lane in report.lanes
    }
    rows_s = {
        lane.name: 2 * _ROW_SHARE * answers_s[lane.name]
        or _DEFAULT_FULL_LANE_S / max(1, lane.slots)
        for lane in report.lanes
    }
    return Throughput(
        prefill_token_s=1 / max(rates, default=_DEFAULT_PREFILL_TOKENS_PER_S),
        row_s=rows_s,
        answer_s=answers_s,
        memory_cost_s=_MEMORY_PRESSURE_S * min(pressure, 1.0),
    )


def load_cost_s(
    throughput: Throughput,
    lane: LaneReport,
    rows: int,
    other_rows: int,
    *,
    full: bool = False,
) -> float:
    """Return the cost of one more request on a lane without its own prefill.

    `rows` are busy in this lane, `other_rows` in the other lanes of the worker. `full`: all slots
    of the lane are taken.
    """
    waiting = rows * (_FULL_LANE_FACTOR if full else 1) + other_rows * _OTHER_LANE_SHARE
    lost_s = draft_loss_share(lane, rows + 1) * throughput.answer_s[lane.name]
    return throughput.memory_cost_s + throughput.row_s[lane.name] * waiting + lost_s


def draft_loss_share(lane: LaneReport, rows: int) -> float:
    """Return the share of an answer's time that a batch of this size loses.

    Drafts gain less in it than in the best batch that this Mac has measured.
    """
    speedups = lane.draft_speedup_by_rows
    speedup = speedups[min(rows, len(speedups)) - 1] if speedups else 0.0
    if not speedup:
        return 0.0 if lane.drafting_pays(rows) else _NOT_PAYING_SHARE
    return 1.0 - speedup / max(speedups)


def _share(used_bytes: int, limit_bytes: int) -> float:
    return used_bytes / limit_bytes if limit_bytes else 0.0
