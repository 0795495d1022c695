"""Cache of shared prompt prefixes: system prompts and tools that are read once.

An entry holds, for the shared beginning of prompts, every cache of the target (recurrent states
too), those of the MTP head, and the last hidden state. A hit continues exactly as the prefill would
have, with speculation. The key is the gateway's prefix key or the worker's own digest, and only a
hint: an entry is used only if its tokens are the beginning of the prompt.
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
    """The caches after a prefix; all rows that start from it share its arrays."""

    tokens: tuple[int, ...]
    caches: tuple[CacheState, ...]
    head_caches: tuple[CacheState, ...]
    """Empty if the prefill ran without an MTP head."""
    last_hidden: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        """Return all arrays."""
        return [array for _, array in _named_arrays(self)]

    @property
    def size_bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(array.nbytes for array in self.arrays)


class PrefixCache:
    """Prefixes in memory, evicted least recently used first at `limit_bytes`.

    With `files`, a background thread also writes every new one to disk. Used by the engine thread
    only, unless a method says otherwise.
    """

    def __init__(self, limit_bytes: int, files: PrefixCacheFiles | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._files = files
        self._writer = ThreadPoolExecutor(1, "paceline-prefix-cache") if files else None
        self._by_key: OrderedDict[str, CachedPrefix] = OrderedDict()
        self._size_bytes = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys in memory, most recently used first; safe from any thread."""
        return tuple(self._by_key)[::-1]

    @property
    def size_bytes(self) -> int:
        """Return the memory in use."""
        return self._size_bytes

    def __contains__(self, key: str) -> bool:
        """Return whether memory holds this key."""
        return key in self._by_key

    def prefetch(self, key: str) -> HostPrefix | None:
        """Read a prefix that is not in memory from disk; safe from any thread, blocks."""
        if self._files is None or key in self._by_key:
            return None
        return self._files.load(key)

    def lookup(self, key: str, tokens: Sequence[int]) -> CachedPrefix | None:
        """Return the entry of this key if `tokens` begin with its tokens."""
        entry = self._by_key.get(key)
        if entry is None or tuple(tokens[: len(entry.tokens)]) != entry.tokens:
            return None
        self._by_key.move_to_end(key)
        return entry

    def store(self, key: str, entry: CachedPrefix) -> None:
        """Insert a new entry, on disk too; evict others until all fit."""
        self._insert(key, entry)
        if self._files is not None and self._writer is not None:
            self._writer.submit(self._files.save, key, to_host(entry))

    def store_prefetched(
        self, key: str, tokens: Sequence[int], prefetched: HostPrefix
    ) -> CachedPrefix | None:
        """Insert an entry read from disk and return it, if `tokens` begin with its tokens."""
        entry = from_host(prefetched)
        if tuple(tokens[: len(entry.tokens)]) != entry.tokens:
            return None
        self._insert(key, entry)
        return entry

    def evict_to(self, size_bytes: int) -> None:
        """Evict the least recently used entries until the others fit into `size_bytes`."""
        while self._by_key and self._size_bytes > size_bytes:
            self._remove(next(iter(self._by_key)))

    def close(self) -> None:
        """Wait for the last writes to disk."""
        if self._writer is not None:
            self._writer.shutdown()

    def _insert(self, key: str, entry: CachedPrefix) -> None:
        self._remove(key)
        if entry.size_bytes > self._limit_bytes:
            return
        self._by_key[key] = entry
        self._size_bytes += entry.size_bytes
        self.evict_to(self._limit_bytes)

    def _remove(self, key: str) -> None:
        removed = self._by_key.pop(key, None)
        if removed is not None:
            self._size_bytes -= removed.size_bytes


def copy_caches(caches: Sequence[LayerCache]) -> tuple[CacheState, ...]:
    """Copy the contents of one row's caches; later appends do not change the copy."""
    return tuple(_copy(cache) for cache in caches)


def _copy(cache: LayerCache) -> CacheState:
    if isinstance(cache, KVCache):
        if cache.keys is None:
            return (None, None)
        keys, values = cache.state
        return (detached(keys), detached(values))
    assert isinstance(cache, ArraysCache)
    return tuple(None if array is None else detached(array) for array in cache.cache)


def detached(array: mx.array) -> mx.array:
    """Return a copy that keeps no other memory alive, as a view of a larger array would."""
    return mx.contiguous(array)


def restore_caches(empty: Sequence[LayerCache], states: Sequence[CacheState]) -> None:
    """Fill fresh caches; they copy before they write."""
    for cache, state in zip(empty, states, strict=True):
        if isinstance(cache, KVCache):
            if state[0] is not None:
                cache.state = state
        else:
            assert isinstance(cache, ArraysCache)
            cache.state = list(state)


def to_host(entry: CachedPrefix) -> HostPrefix:
    """Copy an entry out of MLX; arrays in bfloat16, which NumPy lacks, are copied as bits."""
    arrays: dict[str, np.ndarray[Any, Any]] = {"tokens": np.array(entry.tokens, np.int32)}
    bfloat16 = set()
    for name, array in _named_arrays(entry):
        if array.dtype == mx.bfloat16:
            bfloat16.add(name)
            array = array.view(mx.uint16)  # noqa: PLW2901  # the same array, read as bits
        arrays[name] = np.array(array)
    return HostPrefix(arrays=arrays, bfloat16=frozenset(bfloat16))


def from_host(host: HostPrefix) -> CachedPrefix:
    """Copy an entry back into MLX."""
    slots: dict[str, dict[int, dict[int, mx.array]]] = {"cache": {}, "head": {}}
    last_hidden = None
    for name, values in host.arrays.items():
        array = mx.array(values)
        if name in host.bfloat16:
            array = array.view(mx.bfloat16)
        part, *place = name.split(".")
        if part == "hidden":
            last_hidden = array
        elif part in slots:
            layer, slot = map(int, place)
            slots[part].setdefault(layer, {})[slot] = array
    return CachedPrefix(
        tokens=tuple(host.arrays["tokens"].tolist()),
        caches=_states(slots["cache"]),
        head_caches=_states(slots["head"]),
        last_hidden=last_hidden,
    )


def _states(layers: dict[int, dict[int, mx.array]]) -> tuple[CacheState, ...]:
    return tuple(
        tuple(slots[slot] for slot in sorted(slots)) for _, slots in sorted(layers.items())
    )


def _named_arrays(entry: CachedPrefix) -> Iterator[tuple[str, mx.array]]:
    for part, states in (("cache", entry.caches), ("head", entry.head_caches)):
        for layer, state in enumerate(states):
            for slot, array in enumerate(state):
                if array is not None:
                    yield f"{part}.{layer}.{slot}", array
    if entry.last_hidden is not None:
        yield "hidden", entry.last_hidden
