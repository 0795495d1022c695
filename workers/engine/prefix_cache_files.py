"""Prefix cache on disk, which survives a restart of the worker.

One safetensors file holds one prefix; its name is a digest of the key. A file is used only if its
contents match the digest in its metadata and the same weights have made it. Any other file is
deleted, and the prompt is read again. A file holds no code: no pickle.

Reads and writes happen on plain NumPy arrays, outside the engine thread.
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

_SUFFIX = ".prefix.safetensors"
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPrefix:
    """A cached prefix without MLX; arrays in bfloat16 are stored as bits."""

    arrays: HostArrays
    """By name: `tokens`, `hidden`, and `cache.LAYER.SLOT` or `head.LAYER.SLOT`."""
    bfloat16: frozenset[str]
    """Names of the arrays in bfloat16."""


class PrefixCacheFiles:
    """A directory of cached prefixes of one model, evicted least recently used first."""

    def __init__(self, directory: Path, limit_bytes: int, model: str) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._model = model
        directory.mkdir(parents=True, exist_ok=True)

    def load(self, key: str) -> HostPrefix | None:
        """Read a prefix; return None if there is none, and delete a file that is invalid."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except (OSError, SafetensorError, ValueError) as error:
            return self._discard(path, f"unreadable: {error}")
        if metadata.get("model") != self._model or metadata.get("key") != key:
            return self._discard(path, "made by another model or for another prompt")
        if metadata.get("digest") != _digest(arrays):
            return self._discard(path, "damaged")
        os.utime(path)  # the time of modification orders the eviction
        return HostPrefix(
            arrays=arrays, bfloat16=frozenset(filter(None, metadata.get("bfloat16", "").split(",")))
        )

    def save(self, key: str, prefix: HostPrefix) -> None:
        """Write a prefix atomically; evict the least recently used ones to make room."""
        size_bytes = sum(array.nbytes for array in prefix.arrays.values())
        if size_bytes > self._limit_bytes:
            return
        self._evict_for(size_bytes)
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        metadata = {
            "model": self._model,
            "key": key,
            "bfloat16": ",".join(sorted(prefix.bfloat16)),
            "digest": _digest(prefix.arrays),
        }
        try:
            save_file(dict(prefix.arrays), partial, metadata=metadata)
            partial.replace(path)
        except OSError as error:
            logger.warning("prefix_cache.write_failed error=%s", error)
            partial.unlink(missing_ok=True)

    def _evict_for(self, size_bytes: int) -> None:
        files = sorted(self._directory.glob("*" + _SUFFIX), key=lambda path: path.stat().st_mtime)
        used_bytes = sum(path.stat().st_size for path in files)
        for path in files:
            if used_bytes + size_bytes <= self._limit_bytes:
                return
            used_bytes -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / (blake2b(key.encode(), digest_size=16).hexdigest() + _SUFFIX)

    @staticmethod
    def _discard(path: Path, reason: str) -> None:
        logger.warning("prefix_cache.file_discarded file=%s reason=%s", path.name, reason)
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
