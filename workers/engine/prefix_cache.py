"""What is left of a system prompt once it has been read: caches to start the next row from.

A snapshot holds, after the shared beginning of prompts, every cache of the target (recurrent states
too), those of the MTP head, and the last hidden state, so that a hit goes on exactly as the prefill
would have, with speculation on. It is found by the gateway's prefix key or by the worker's own
digest, and used only if its tokens are the beginning of the prompt: a key is a hint, never proof.

All of it belongs to the engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from workers.engine.model import ArraysCache, KVCache, LayerCache
from workers.engine.prefix_cache_files import HostPrefix, PrefixCacheFiles

CacheState = tuple[mx.array | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The caches after a prefix; its arrays are shared by all rows that start from it."""

    tokens: tuple[int, ...]
    caches: tuple[CacheState, ...]
    head_caches: tuple[CacheState, ...]
    """Empty where the model has no MTP head."""
    last_hidden: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        """List all arrays."""
        arrays = [array for state in (*self.caches, *self.head_caches) for array in state]
        return [array for array in (*arrays, self.last_hidden) if array is not None]

    @property
    def size_bytes(self) -> int:
        """Count the bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


@dataclass(slots=True)
class PrefixCacheStats:
    """How often a prefix was found, since start."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    evicted: int = 0
    tokens_saved: int = 0


class PrefixCache:
    """The least recently used go first when `limit_bytes` are exceeded.

    With `files`, every new one is also written to disk, by a thread that nobody waits for.
    """

    def __init__(self, limit_bytes: int, files: PrefixCacheFiles | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._files = files
        self._writer = ThreadPoolExecutor(1, "paceline-prefix_cache") if files else None
        self._by_key: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._size_bytes = 0
        self.counts = PrefixCacheStats()

    @property
    def keys(self) -> tuple[str, ...]:
        """Name those in memory, the last one used first; safe from any thread."""
        return tuple(self._by_key)[::-1]

    def __contains__(self, key: str) -> bool:
        """Say whether there is one of this key in memory."""
        return key in self._by_key

    def prefetch(self, key: str) -> HostPrefix | None:
        """Read from disk what memory does not hold; safe from any thread, blocks."""
        if self._files is None or key in self._by_key:
            return None
        return self._files.load(key)

    def lookup(self, key: str, tokens: Sequence[int]) -> CachedPrefix | None:
        """Return the snapshot of this key if it is a beginning of these tokens."""
        found = self._by_key.get(key)
        if found is None or tuple(tokens[: len(found.tokens)]) != found.tokens:
            self.counts.misses += 1
            return None
        self._by_key.move_to_end(key)
        self.counts.hits += 1
        self.counts.tokens_saved += len(found.tokens)
        return found

    def store(self, key: str, snapshot: CachedPrefix) -> None:
        """Store a snapshot just taken; drop the least recently used until all fit."""
        self._insert(key, snapshot)
        if self._files is not None and self._writer is not None:
            self._writer.submit(self._files.save, key, to_host(snapshot))

    def store_prefetched(
        self, key: str, tokens: Sequence[int], read: HostPrefix
    ) -> CachedPrefix | None:
        """Store what came from disk, if it is a beginning of these tokens."""
        snapshot = from_host(read)
        if tuple(tokens[: len(snapshot.tokens)]) != snapshot.tokens:
            return None
        self._insert(key, snapshot)
        self.counts.tokens_saved += len(snapshot.tokens)
        return snapshot

    def close(self) -> None:
        """Wait for the last writes."""
        if self._writer is not None:
            self._writer.shutdown()

    def _insert(self, key: str, snapshot: CachedPrefix) -> None:
        self._remove(key)
        if snapshot.size_bytes > self._limit_bytes:
            return
        self._by_key[key] = snapshot
        self._size_bytes += snapshot.size_bytes
        self.counts.stored += 1
        self.evict_to(self._limit_bytes)

    def evict_to(self, size_bytes: int) -> None:
        """Drop the least recently used until the others take no more than this."""
        while self._by_key and self._size_bytes > size_bytes:
            self._remove(next(iter(self._by_key)))
            self.counts.evicted += 1

    @property
    def size_bytes(self) -> int:
        """Count the bytes in use."""
        return self._size_bytes

    def _remove(self, key: str) -> None:
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


def to_host(snapshot: CachedPrefix) -> HostPrefix:
    """Copy a snapshot out of MLX; NumPy has no bfloat16, so its bits are carried."""
    arrays: dict[str, np.ndarray[Any, Any]] = {"tokens": np.array(snapshot.tokens, np.int32)}
    half = set()
    for name, array in _named(snapshot):
        if array.dtype == mx.bfloat16:
            half.add(name)
            array = array.view(mx.uint16)  # noqa: PLW2901  # the same array, read as bits
        arrays[name] = np.array(array)
    return HostPrefix(arrays=arrays, half=frozenset(half))


def from_host(read: HostPrefix) -> CachedPrefix:
    """Bring a snapshot back into MLX."""
    found: dict[str, dict[int, dict[int, mx.array]]] = {"cache": {}, "head": {}}
    last_hidden = None
    for name, host in read.arrays.items():
        array = mx.array(host)
        if name in read.half:
            array = array.view(mx.bfloat16)
        part, *place = name.split(".")
        if part == "hidden":
            last_hidden = array
        elif part in found:
            layer, slot = map(int, place)
            found[part].setdefault(layer, {})[slot] = array
    return CachedPrefix(
        tokens=tuple(read.arrays["tokens"].tolist()),
        caches=_states(found["cache"]),
        head_caches=_states(found["head"]),
        last_hidden=last_hidden,
    )


def _named(snapshot: CachedPrefix) -> Iterator[tuple[str, mx.array]]:
    parts = {"cache": snapshot.caches, "head": snapshot.head_caches}
    for part, states in parts.items():
        for layer, state in enumerate(states):
            for slot, array in enumerate(state):
                if array is not None:
                    yield f"{part}.{layer}.{slot}", array
    if snapshot.last_hidden is not None:
        yield "hidden", snapshot.last_hidden


def _states(layers: dict[int, dict[int, mx.array]]) -> tuple[CacheState, ...]:
    return tuple(
        tuple(slots[slot] for slot in sorted(slots)) for _, slots in sorted(layers.items())
    )


def _save(cache: LayerCache) -> CacheState:
    if isinstance(cache, KVCache):
        if cache.keys is None:
            return (None, None)
        keys, values = cache.state
        return (detached(keys), detached(values))
    assert isinstance(cache, ArraysCache)
    return tuple(None if array is None else detached(array) for array in cache.cache)


def detached(array: mx.array) -> mx.array:
    """Return an array that keeps nothing else in memory, as a view of a larger one would."""
    return mx.contiguous(array)
