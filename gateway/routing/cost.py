"""What a lane would cost a request, in seconds: worked out when a worker changes, not per request.

A cost is the time to the first token as far as it can be known here, and what the others on the
worker lose by one more. What a request adds is its own reading alone: tokens times
`prefill_token_s`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workers.protocol import LaneReport, WorkerReport

# A worker that has not measured yet is taken for a Mac of the middle.
_READ_TOKENS_S = 1000.0
_FULL_LANE_S = 2.4
"""What a full lane costs where nobody has measured; a row its share of that."""
_ANSWER_TOKENS = 100
_ROW_SHARE = 0.12
"""A further row makes a step so much longer, for the newcomer and for all others."""
_OTHER_LANE_SHARE = 0.5
"""A row of the other lane, against one of this: they take turns on one machine."""
_NOT_PAYING_SHARE = 0.3
"""Of the time of an answer: what is lost in a batch for which drafting does not pay any more."""
FULL = 10
"""As so many times its rows counts a lane that cannot take the request now."""
# From this share of its memory on a worker has to evict, and rows begin to wait for each other.
_CROWDED = 0.8
_CROWDED_S = 2.0


class Throughput(NamedTuple):
    """How fast a worker is, by its last report."""

    prefill_token_s: float
    """A token of a prompt."""
    row_s: Mapping[str, float]
    """By lane: what one more row costs."""
    answer_s: Mapping[str, float]
    """By lane: the time of an answer."""
    memory_cost_s: float
    """What it costs that its memory is nearly full."""


def throughput_of(report: WorkerReport) -> Throughput:
    """Read from a report how fast a worker is; once for each report."""
    rates = [lane.prefill_tokens_per_s for lane in report.lanes if lane.prefill_tokens_per_s]
    limit_bytes = report.memory_limit_bytes
    share = report.memory_bytes / limit_bytes if limit_bytes else 0.0
    crowded = min(max(share - _CROWDED, 0.0) / (1 - _CROWDED), 1.0)
    answers = {lane.name: _answer_s(lane) for lane in report.lanes}
    return Throughput(
        1 / (max(rates) if rates else _READ_TOKENS_S),
        {lane.name: _row_s(lane, answers[lane.name]) for lane in report.lanes},
        answers,
        _CROWDED_S * crowded,
    )


UNMEASURED = Throughput(1 / _READ_TOKENS_S, {}, {}, 0.0)


def _answer_s(lane: LaneReport) -> float:
    return _ANSWER_TOKENS / lane.decode_tokens_per_s if lane.decode_tokens_per_s else 0.0


def _row_s(lane: LaneReport, answer_s: float) -> float:
    return 2 * _ROW_SHARE * answer_s or _FULL_LANE_S / max(1, lane.slots)


def load_cost_s(
    throughput: Throughput, lane: LaneReport, rows: float, others: int, *, pays: bool
) -> float:
    """Tell what one more request on a lane costs, beside the reading of its own prompt.

    `rows` are those of the lane, `others` those of the worker's other lanes.
    """
    row_s = throughput.row_s.get(lane.name) or _row_s(lane, 0.0)
    cost_s = throughput.memory_cost_s + row_s * (rows + others * _OTHER_LANE_SHARE)
    return cost_s if pays else cost_s + _NOT_PAYING_SHARE * throughput.answer_s.get(lane.name, 0.0)
