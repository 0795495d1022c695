"""Cache of shared prompt prefixes: system prompts and tools that are read once.

An entry holds, for the shared beginning of prompts, every cache of the target (recurrent states
too), those of the MTP head, and the last hidden state. A hit continues exactly as the prefill would
have, with speculation. The key is the gateway's prefix key or the worker's own digest, and only a
hint: an entry is used only if its tokens are the beginning of the prompt.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from workers.engine.model import LayerCache
from workers.engine.prefix_cache_files import HostPrefix, PrefixCacheFiles

logger = logging.getLogger(__name__)

CacheState = Sequence[mx.array | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The caches after a prefix; all rows that start from it share its arrays."""

    tokens: tuple[int, ...]
    caches: Sequence[CacheState]
    head_caches: Sequence[CacheState]
    """Empty if the prefill ran without an MTP head."""
    last_hidden: mx.array | None

    @property
    def arrays(self) -> dict[str, mx.array]:
        """Return all arrays, by the names that `HostPrefix` describes."""
        tree = {"cache": self.caches, "head": self.head_caches, "hidden": self.last_hidden}
        return {name: array for name, array in tree_flatten(tree) if array is not None}

    @property
    def size_bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


class PrefixCache:
    """Prefixes in memory, evicted least recently used first at `limit_bytes`.

    With `files`, a background thread also writes every new one to disk. Used by the engine thread
    only, unless a method says otherwise.
    """

    def __init__(self, limit_bytes: int, files: PrefixCacheFiles | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._files = files
        self._writer = ThreadPoolExecutor(1, "paceline-prefix-cache")
        self._by_key: OrderedDict[str, CachedPrefix] = OrderedDict()
        self.size_bytes = 0
        """Memory in use."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys in memory, most recently used first; safe from any thread."""
        return tuple(self._by_key)[::-1]

    def __contains__(self, key: str) -> bool:
        """Return whether memory holds this key."""
        return key in self._by_key

    def prefetch(self, key: str) -> HostPrefix | None:
        """Read a prefix that is not in memory from disk; safe from any thread, blocks."""
        if self._files is None or key in self._by_key:
            return None
        return self._files.load(key)

    def lookup(
        self, key: str, tokens: Sequence[int], prefetched: HostPrefix | None = None
    ) -> CachedPrefix | None:
        """Return the entry of this key if `tokens` begin with its tokens.

        An entry `prefetched` from disk is inserted where memory has none that fits.
        """
        entry = self._by_key.get(key)
        if entry is None and prefetched is not None:
            try:
                entry = from_host(prefetched)
            except Exception as error:  # noqa: BLE001  # the prompt is read again
                logger.warning("prefix_cache.file_unusable error=%s", error)
        if entry is None or tuple(tokens[: len(entry.tokens)]) != entry.tokens:
            return None
        if key in self._by_key:
            self._by_key.move_to_end(key)
        else:
            self._insert(key, entry)
        return entry

    def store(
        self,
        key: str,
        tokens: tuple[int, ...],
        caches: Sequence[LayerCache],
        head_caches: Sequence[LayerCache],
        last_hidden: mx.array | None,
    ) -> None:
        """Insert a copy of the caches, on disk too; evict other entries until all fit."""
        entry = CachedPrefix(
            tokens=tokens,
            caches=[[_copy(array) for array in cache.state] for cache in caches],
            head_caches=[[_copy(array) for array in cache.state] for cache in head_caches],
            last_hidden=_copy(last_hidden),
        )
        mx.eval(entry.arrays)
        self._insert(key, entry)
        if self._files is not None:
            self._writer.submit(self._files.save, key, to_host(entry))

    def evict_to(self, size_bytes: int) -> None:
        """Evict the least recently used entries until the others fit into `size_bytes`."""
        while self._by_key and self.size_bytes > size_bytes:
            self._remove(next(iter(self._by_key)))

    def close(self) -> None:
        """Wait for the last writes to disk."""
        self._writer.shutdown()

    def _insert(self, key: str, entry: CachedPrefix) -> None:
        self._remove(key)
        if entry.size_bytes > self._limit_bytes:
            return
        self._by_key[key] = entry
        self.size_bytes += entry.size_bytes
        self.evict_to(self._limit_bytes)

    def _remove(self, key: str) -> None:
        removed = self._by_key.pop(key, None)
        if removed is not None:
            self.size_bytes -= removed.size_bytes


def _copy(array: mx.array | None) -> mx.array | None:
    """Return a copy that keeps no other memory alive, as a view of a larger array would."""
    return None if array is None else mx.contiguous(array)


def to_host(entry: CachedPrefix) -> HostPrefix:
    """Copy an entry out of MLX; arrays in bfloat16, which NumPy lacks, are copied as bits."""
    arrays: dict[str, np.ndarray[Any, Any]] = {"tokens": np.array(entry.tokens, np.int32)}
    bfloat16 = set()
    for name, array in entry.arrays.items():
        if array.dtype == mx.bfloat16:
            bfloat16.add(name)
            array = array.view(mx.uint16)  # noqa: PLW2901  # the same array, read as bits
        arrays[name] = np.array(array)
    return HostPrefix(arrays=arrays, bfloat16=frozenset(bfloat16))


def from_host(host: HostPrefix) -> CachedPrefix:
    """Copy an entry back into MLX."""
    arrays = {name: mx.array(values) for name, values in host.arrays.items()}
    arrays |= {name: arrays[name].view(mx.bfloat16) for name in host.bfloat16}
    tree = tree_unflatten(arrays)
    return CachedPrefix(
        tokens=tuple(host.arrays["tokens"].tolist()),
        caches=tree["cache"],
        head_caches=tree.get("head", ()),
        last_hidden=tree.get("hidden"),
    )
