import mlx.core as mx
import pytest

from workers.engine.model.kv_cache import MIN_SLOTS, RowCache, capacity


def filled(lengths: list[int], slots: int = 8, start: float = 0.0) -> RowCache:
    numbers = mx.arange(len(lengths) * slots, dtype=mx.float32)
    keys = start + numbers.reshape(len(lengths), 1, slots, 1)
    return RowCache(keys, -keys, mx.array(lengths))


def tokens(*rows: list[float]) -> mx.array:
    return mx.array(rows)[:, None, :, None]


def test_append_writes_at_the_offset_of_each_row_over_rejected_tokens() -> None:
    cache = filled([2, 5])
    keys, values = cache.update_and_fetch(
        tokens([90.0, 91.0], [92.0, 93.0]), tokens([1.0, 2.0], [3.0, 4.0])
    )
    assert keys[0, 0, :5, 0].tolist() == [0.0, 1.0, 90.0, 91.0, 4.0]
    assert keys[1, 0, 4:, 0].tolist() == [12.0, 92.0, 93.0, 15.0]
    assert values[1, 0, 5:7, 0].tolist() == [3.0, 4.0]
    assert cache.offset.tolist() == [4, 7]
    cache.offset = mx.array([3, 7])
    keys, _ = cache.update_and_fetch(tokens([70.0], [71.0]), tokens([0.0], [0.0]))
    assert keys[0, 0, :4, 0].tolist() == [0.0, 1.0, 90.0, 70.0]
    assert keys[1, 0, 5:, 0].tolist() == [92.0, 93.0, 71.0]


def test_the_mask_allows_each_query_its_row_up_to_itself() -> None:
    mask = filled([1, 3], slots=6).make_mask(2)

    assert mask[0, 0].tolist() == [[True] * 2 + [False] * 4, [True] * 3 + [False] * 3]
    assert mask[1, 0].tolist() == [[True] * 4 + [False] * 2, [True] * 5 + [False]]


def test_slots_are_reserved_with_their_contents_and_released_with_their_rows() -> None:
    cache = filled([8], slots=8)
    cache.reserve(9)
    assert cache.slots == MIN_SLOTS
    assert cache.keys[0, 0, 6:9, 0].tolist() == [6.0, 7.0, 0.0]
    cache = filled([2, 2000], slots=2048)
    cache.filter(mx.array([0]))
    cache.shrink(2)
    assert cache.slots == MIN_SLOTS


@pytest.mark.parametrize("needed", [1, 256, 257, 2048, 2049, 5000, 33_000])
def test_capacities_are_few_and_waste_less_than_a_quarter(needed: int) -> None:
    slots = capacity(needed)

    assert slots >= needed
    assert slots == MIN_SLOTS or slots - needed < slots / 4 or slots <= 4 * MIN_SLOTS
    assert capacity(slots) == slots
    assert len({capacity(length) for length in range(1, 32_769)}) < 32


def test_joined_rows_preserve_their_slots_and_selected_ones_move_into_those_of_others() -> None:
    cache = filled([2, 5])
    cache.extend(filled([4], slots=16, start=1000.0))
    assert cache.offset.tolist() == [2, 5, 4]
    assert cache.keys[2, 0, :4, 0].tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
    assert cache.keys[1, 0, :2, 0].tolist() == [8.0, 9.0]
    cache.filter(mx.array([2, 1]))
    assert cache.offset.tolist() == [4, 5]
    assert cache.keys[0, 0, :4, 0].tolist() == [1000.0, 1001.0, 1002.0, 1003.0]
