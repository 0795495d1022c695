"""What is left of a system prompt once it has been read: caches to start the next row from.

A snapshot holds, after the shared beginning of prompts, every cache of the target (recurrent states
too), those of the MTP head, and the last hidden state, so that a hit goes on exactly as the prefill
would have, with speculation on. It is found by the gateway's prefix key or by the worker's own
digest, and used only if its tokens are the beginning of the prompt: a key is a hint, never proof.

All of it belongs to the engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from workers.engine.seam import ArraysCache, KVCache, LayerCache

CacheState = tuple[mx.array | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The caches after a prefix; its arrays are shared by all rows that start from it."""

    tokens: tuple[int, ...]
    caches: tuple[CacheState, ...]
    head_caches: tuple[CacheState, ...]
    """Empty where the model has no MTP head."""
    last_hidden: mx.array | None

    @property
    def size_bytes(self) -> int:
        """Count the bytes of all arrays."""
        arrays = [array for state in (*self.caches, *self.head_caches) for array in state]
        return sum(array.nbytes for array in (*arrays, self.last_hidden) if array is not None)


@dataclass(slots=True)
class SnapshotCounts:
    """How often a prefix was found, since start."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    tokens_saved: int = 0


class Snapshots:
    """The least recently used go first when `limit_bytes` are exceeded."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._by_key: OrderedDict[str, Snapshot] = OrderedDict()
        self._size_bytes = 0
        self.counts = SnapshotCounts()

    def find(self, key: str, tokens: Sequence[int]) -> Snapshot | None:
        """Return the snapshot of this key if it is a beginning of these tokens."""
        found = self._by_key.get(key)
        if found is None or tuple(tokens[: len(found.tokens)]) != found.tokens:
            self.counts.misses += 1
            return None
        self._by_key.move_to_end(key)
        self.counts.hits += 1
        self.counts.tokens_saved += len(found.tokens)
        return found

    def keep(self, key: str, snapshot: Snapshot) -> None:
        """Store a snapshot; drop the least recently used until all fit."""
        self._drop(key)
        if snapshot.size_bytes > self._limit_bytes:
            return
        self._by_key[key] = snapshot
        self._size_bytes += snapshot.size_bytes
        self.counts.stored += 1
        while self._size_bytes > self._limit_bytes:
            self._drop(next(iter(self._by_key)))
            self.counts.evicted += 1

    @property
    def size_bytes(self) -> int:
        """Count the bytes in use."""
        return self._size_bytes

    def _drop(self, key: str) -> None:
        dropped = self._by_key.pop(key, None)
        if dropped is not None:
            self._size_bytes -= dropped.size_bytes


def save_caches(caches: Sequence[LayerCache]) -> tuple[CacheState, ...]:
    """Copy what one row's caches hold now; later appends do not touch the copy."""
    return tuple(_save(cache) for cache in caches)


def restore_caches(empty: Sequence[LayerCache], states: Sequence[CacheState]) -> None:
    """Fill fresh caches; they copy before they write."""
    for cache, state in zip(empty, states, strict=True):
        if isinstance(cache, KVCache):
            if state[0] is not None:
                cache.state = state
        else:
            assert isinstance(cache, ArraysCache)
            cache.state = list(state)


def _save(cache: LayerCache) -> CacheState:
    if isinstance(cache, KVCache):
        if cache.keys is None:
            return (None, None)
        keys, values = cache.state
        return (mx.contiguous(keys), mx.contiguous(values))
    assert isinstance(cache, ArraysCache)
    return tuple(cache.cache)
