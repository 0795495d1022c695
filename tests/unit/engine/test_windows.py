"""Rings of windowed layers: what a query sees, and what a rollback, a join and a copy leave."""

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import ChunkedKVCache, RotatingKVCache

from workers.engine.model.kv_cache import MIN_SLOTS, STEP_TOKENS
from workers.engine.model.windows import (
    WindowCache,
    recent_tokens,
    restore_window,
    ring_slots,
    to_ring,
)

WINDOW = 300
RING = ring_slots(WINDOW)


def values(begin: int, end: int) -> tuple[mx.array, mx.array]:
    """Return keys and values, which are the numbers of their tokens."""
    numbers = mx.arange(begin, end, dtype=mx.float32)[None, None, :, None]
    return numbers, numbers


def numbers_of(keys_and_values: tuple[mx.array, mx.array]) -> list[int]:
    return keys_and_values[0][0, 0, :, 0].tolist()


def read(tokens: int, window: int = WINDOW) -> RotatingKVCache:
    """Read a prompt in chunks, as a prefill does."""
    cache = RotatingKVCache(max_size=window)
    for begin in range(0, tokens, 96):
        cache.update_and_fetch(*values(begin, min(begin + 96, tokens)))
    return cache


def seen(cache: WindowCache, length: int = 1) -> list[list[set[int]]]:
    """Append the next tokens of every row; return the tokens that each query sees, by row."""
    offsets = cache.offset.tolist()
    mask = cache.make_mask(length)[:, 0]
    new = mx.concatenate([values(at, at + length)[0] for at in offsets])
    keys, _ = cache.update_and_fetch(new, new)
    held = keys[:, 0, :, 0].astype(mx.int32).tolist()
    return [
        [
            {token for token, visible in zip(held[row], query, strict=True) if visible}
            for query in mask[row].tolist()
        ]
        for row in range(len(offsets))
    ]


def window_of(token: int, window: int = WINDOW) -> set[int]:
    return set(range(max(token - window + 1, 0), token + 1))


@pytest.mark.parametrize("tokens", [1, 40, 299, 300, 301, 315, 316, 700, 1000])
def test_a_query_sees_the_tokens_of_its_window(tokens: int) -> None:
    cache = to_ring(read(tokens), room_tokens=1)
    for at in range(tokens, tokens + 40):
        cache.reserve(at + 1)
        assert seen(cache) == [[window_of(at)]]
    assert cache.slots <= RING


def test_rejected_drafts_leave_no_trace_at_the_edge_of_the_window() -> None:
    cache = to_ring(read(290), room_tokens=STEP_TOKENS)
    at = 290
    for kept in (1, 3, 16, 2, 1, 1, 9, 1, 5) * 3:
        cache.reserve(at + STEP_TOKENS)
        drafted = seen(cache, STEP_TOKENS)
        assert drafted == [[window_of(at + i) for i in range(STEP_TOKENS)]]
        at += kept
        cache.offset = mx.array([at])
    assert seen(cache) == [[window_of(at)]]


def test_rows_of_all_lengths_share_rings() -> None:
    cache = to_ring(read(10), room_tokens=1)
    assert cache.slots == MIN_SLOTS
    for tokens in (310, 900):
        cache.extend(to_ring(read(tokens), room_tokens=1))
    assert cache.slots == RING
    for step in range(30):
        cache.reserve(900 + step + 1)
        rows = seen(cache)
        assert rows == [[window_of(tokens + step)] for tokens in (10, 310, 900)]
    cache.filter(mx.array([0]))
    cache.shrink(40)
    assert cache.slots == MIN_SLOTS
    assert seen(cache) == [[window_of(40)]]


@pytest.mark.parametrize("tokens", [1, 96, 299, 300, 301, 500, 1000])
@pytest.mark.parametrize("single", [0, 1, 7])
def test_the_window_of_a_prompt_goes_from_cache_to_cache(tokens: int, single: int) -> None:
    """From the family's cache, in whatever order it has its tokens, into a new one and a ring."""
    cache = read(tokens)
    for at in range(tokens, tokens + single):
        cache.update_and_fetch(*values(at, at + 1))
    end = tokens + single
    copied = recent_tokens(cache)
    expected = list(range(max(end - WINDOW, 0), end))
    assert numbers_of(copied) == expected
    restored = RotatingKVCache(max_size=WINDOW)
    restore_window(restored, *copied, end)
    restored.update_and_fetch(*values(end, end + 1))
    assert numbers_of(recent_tokens(restored)) == [*expected, end][-WINDOW:]
    assert numbers_of(copied) == expected, "the stored copy stays as it is"
    assert numbers_of(to_ring(cache, room_tokens=1).recent_tokens(0, end)) == expected


def test_the_window_before_a_rejected_draft_is_read_from_a_ring() -> None:
    cache = to_ring(read(800), room_tokens=STEP_TOKENS)
    cache.update_and_fetch(*values(800, 816))
    assert numbers_of(cache.recent_tokens(0, 801)) == list(range(501, 801))


def test_a_query_sees_its_own_chunk_where_the_context_is_cut_into_chunks() -> None:
    chunk = 100
    family = ChunkedKVCache(chunk)
    for begin in range(0, 250, 50):
        family.maybe_trim_front()
        family.update_and_fetch(*values(begin, begin + 50))
    assert numbers_of(recent_tokens(family)) == list(range(150, 250))
    cache = to_ring(family, room_tokens=1)
    for at in range(250, 420):
        cache.reserve(at + 1)
        assert seen(cache) == [[set(range(at // chunk * chunk, at + 1))]]
    restored = ChunkedKVCache(chunk)
    restore_window(restored, *recent_tokens(family), 250)
    assert (restored.offset, restored.start_position) == (250, 150)
