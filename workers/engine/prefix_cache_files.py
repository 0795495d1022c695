"""Snapshots on disk: a system prompt that was read yesterday need not be read today.

One safetensors file a snapshot, named by a digest of its key. A file is a cache and nothing more:
it is used only if its bytes match the digest written beside them and it was made by the very same
weights; whatever is wrong with it, it is removed and the prompt is read again. No pickle, no code.

Reading and writing happen away from the engine thread, on plain NumPy arrays.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

logger = logging.getLogger(__name__)

HostArrays = Mapping[str, np.ndarray[Any, Any]]

_SUFFIX = ".snapshot.safetensors"
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPrefix:
    """A snapshot without MLX: half-precision arrays are carried as their bits."""

    arrays: HostArrays
    """By place, e.g. `cache.3.0`; `tokens` among them."""
    half: frozenset[str]
    """Names of the arrays that are bfloat16."""


class PrefixCacheFiles:
    """A directory of cached prefixes of one model, evicted least recently used first."""

    def __init__(self, folder: Path, limit_bytes: int, model: str) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._model = model
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, key: str) -> HostPrefix | None:
        """Read a snapshot; None if there is none, or none that can be trusted."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                written = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError, ValueError) as error:
            return self._discard(path, f"unreadable: {error}")
        if written.get("model") != self._model or written.get("key") != key:
            return self._discard(path, "made by another model or for another prompt")
        if written.get("digest") != _digest(arrays):
            return self._discard(path, "damaged")
        os.utime(path)  # used now: the last to be evicted
        return HostPrefix(
            arrays=arrays, half=frozenset(filter(None, written.get("half", "").split(",")))
        )

    def save(self, key: str, snapshot: HostPrefix) -> None:
        """Write a snapshot, all of it or nothing, and make room for it first."""
        size_bytes = sum(array.nbytes for array in snapshot.arrays.values())
        if size_bytes > self._limit_bytes:
            return
        self._evict_for(size_bytes)
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        metadata = {
            "model": self._model,
            "key": key,
            "half": ",".join(sorted(snapshot.half)),
            "digest": _digest(snapshot.arrays),
        }
        try:
            save_file(dict(snapshot.arrays), partial, metadata=metadata)
            partial.replace(path)
        except OSError as error:
            logger.warning("snapshot.not_written error=%s", error)
            partial.unlink(missing_ok=True)

    def _evict_for(self, wanted_bytes: int) -> None:
        files = sorted(self._folder.glob("*" + _SUFFIX), key=lambda path: path.stat().st_mtime)
        used_bytes = sum(path.stat().st_size for path in files)
        for path in files:
            if used_bytes + wanted_bytes <= self._limit_bytes:
                return
            used_bytes -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / (blake2b(key.encode(), digest_size=16).hexdigest() + _SUFFIX)

    @staticmethod
    def _discard(path: Path, why: str) -> None:
        logger.warning("snapshot.discarded file=%s why=%s", path.name, why)
        path.unlink(missing_ok=True)


def fingerprint(folder: Path) -> str:
    """Tell one checkpoint from another: its configuration, and samples of its weights.

    Two fine-tunes differ nearly everywhere, so a few blocks of each file tell them apart without
    reading tens of gigabytes.
    """
    digest = blake2b((folder / "config.json").read_bytes(), digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}:{size_bytes}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size_bytes * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _digest(arrays: HostArrays) -> str:
    digest = blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name}:{array.dtype}:{array.shape}".encode())
        digest.update(struct.pack("q", array.nbytes))
        digest.update(array.data.cast("B") if array.nbytes else b"")
    return digest.hexdigest()
