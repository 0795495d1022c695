import mlx.core as mx
import pytest

from workers.engine.row_cache import SLOT_STEP, RowCache


def filled(lengths: list[int], slots: int = 8, start: float = 0.0) -> RowCache:
    keys = start + mx.arange(len(lengths) * slots).reshape(len(lengths), 1, slots, 1).astype(
        mx.float32
    )
    return RowCache(lengths, keys, -keys)


def tokens(*rows: list[float]) -> mx.array:
    return mx.array(rows)[:, None, :, None]


def test_append_writes_behind_every_rows_own_cursor() -> None:
    cache = filled([2, 5])

    keys, values = cache.update_and_fetch(tokens([100.0], [200.0]), tokens([1.0], [2.0]))

    assert keys[0, 0, 2, 0].item() == 100.0
    assert keys[1, 0, 5, 0].item() == 200.0
    assert values[1, 0, 5, 0].item() == 2.0
    assert keys[1, 0, 2, 0].item() == 10.0


def test_rejected_tokens_are_overwritten_by_the_next_append() -> None:
    cache = filled([2, 5])
    cache.update_and_fetch(tokens([90.0, 91.0], [92.0, 93.0]), tokens([0.0, 0.0], [0.0, 0.0]))

    cache.advance([1, 2])
    keys, _ = cache.update_and_fetch(tokens([70.0], [71.0]), tokens([0.0], [0.0]))

    assert cache.lengths == [3, 7]
    assert keys[0, 0, :4, 0].tolist() == [0.0, 1.0, 90.0, 70.0]
    assert keys[1, 0, 5:8, 0].tolist() == [92.0, 93.0, 71.0]


def test_rewind_forgets_all_that_was_appended() -> None:
    cache = filled([2, 5])
    cache.update_and_fetch(tokens([90.0], [92.0]), tokens([0.0], [0.0]))

    cache.rewind()

    assert (cache.lengths, cache.size(), cache.offset.tolist()) == ([2, 5], 5, [2, 5])


def test_mask_shows_each_query_its_own_rows_past_and_itself() -> None:
    mask = filled([1, 3]).make_mask(2)
    assert isinstance(mask, mx.array)

    assert mask[0, 0].tolist() == [
        [True, True, False, False, False],
        [True, True, True, False, False],
    ]
    assert mask[1, 0].tolist() == [
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]


def test_rows_of_one_length_need_no_mask_array() -> None:
    level = filled([3, 3])

    assert (level.make_mask(1), level.make_mask(2)) == (None, "causal")


def test_append_past_the_capacity_grows_it() -> None:
    cache = filled([8], slots=8)

    keys, _ = cache.update_and_fetch(tokens([9.0]), tokens([9.0]))

    assert keys.shape[2] == 9
    assert cache.keys.shape[2] >= SLOT_STEP
    assert keys[0, 0, 7:, 0].tolist() == [7.0, 9.0]


def test_joined_rows_keep_their_own_slots() -> None:
    cache = filled([2, 5])

    cache.join(filled([4], slots=16, start=1000.0))

    assert cache.lengths == [2, 5, 4]
    assert cache.keys[2, 0, :4, 0].tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
    assert cache.keys[1, 0, :2, 0].tolist() == [8.0, 9.0]


def test_kept_rows_close_the_gap_of_dropped_ones() -> None:
    cache = filled([2, 5, 3])

    cache.keep([2, 0])

    assert cache.lengths == [3, 2]
    assert cache.keys[0, 0, :3, 0].tolist() == [16.0, 17.0, 18.0]


def test_a_transaction_that_is_not_open_is_refused() -> None:
    cache = filled([2])
    stale = cache.start_speculation(2)
    cache.abort_speculation(stale)

    with pytest.raises(RuntimeError):
        cache.validate_speculation([1], stale)
