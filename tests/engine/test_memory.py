"""Prompts that cannot fit are refused, rows that do not fit yet wait, and nothing piles up."""

import mlx.core as mx
import pytest

from tests.engine.conftest import run
from workers.engine.memory import MemoryEstimate, measure_memory
from workers.engine.requests import Finished


def test_the_estimate_is_what_a_row_really_takes(checkpoint) -> None:
    estimate = measure_memory(checkpoint.target, None)
    caches = checkpoint.target.new_caches()
    tokens = 1024
    checkpoint.target.forward(
        mx.zeros((1, tokens), dtype=mx.int32), caches, mx.arange(tokens)[None]
    )
    mx.eval([cache.state for cache in caches])
    taken_bytes = sum(
        array.nbytes for cache in caches for array in cache.state if array is not None
    )

    assert taken_bytes == pytest.approx(
        estimate.row_bytes + tokens * estimate.token_bytes, rel=0.01
    )


def test_a_row_that_does_not_fit_beside_others_waits_and_then_runs(make_lane, ask) -> None:
    one_row = MemoryEstimate(token_bytes=1, row_bytes=0, room_bytes=600)
    lane = make_lane(memory=one_row)
    heard = [ask(lane, "Hello", max_tokens=12) for _ in range(3)]
    most = 0
    while lane.busy:
        lane.step()
        most = max(most, lane.live)

    assert most == 2
    assert all(isinstance(one.end, Finished) for one in heard)


def test_many_rows_in_a_row_leave_memory_flat(make_lane, ask) -> None:
    lane = make_lane()

    def burst() -> int:
        for _ in range(40):
            ask(lane, "Hello", max_tokens=3)
        run(lane)
        mx.synchronize()  # what was handed to the device last may still hold its inputs
        return int(mx.get_active_memory())

    burst()
    first_bytes = burst()
    last_bytes = [burst() for _ in range(4)][-1]

    assert last_bytes <= first_bytes + 4096
