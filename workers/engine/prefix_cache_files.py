"""Prefix cache on disk, which survives a restart of the worker.

One safetensors file holds one prefix; its name is a digest of the key. A file is used only if a
worker with the same secret has written it, which its HMAC proves, and with the same weights. Any
other file is deleted, and the prompt is read again. A file holds no code: no pickle.

Reads and writes happen on plain NumPy arrays, outside the engine thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

logger = logging.getLogger(__name__)

HostArrays = Mapping[str, np.ndarray[Any, Any]]

_SUFFIX = ".prefix.safetensors"
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPrefix:
    """A cached prefix without MLX; arrays in bfloat16 are stored as bits."""

    arrays: HostArrays
    """By name: `tokens`, `hidden`, and `cache.LAYER.SLOT` or `head.LAYER.SLOT`."""
    bfloat16: frozenset[str]
    """Names of the arrays in bfloat16."""


class PrefixCacheFiles:
    """A directory of cached prefixes of one model, evicted least recently used first."""

    def __init__(self, directory: Path, limit_bytes: int, model: str, secret: bytes) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._model = model
        self._secret = secret

    def load(self, key: str) -> HostPrefix | None:
        """Read a prefix; return None if there is none, and delete a file that is invalid."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            if path.stat().st_size > self._limit_bytes + _MAX_HEADER_BYTES:
                return self._discard(path, "too large")
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            bfloat16 = frozenset(filter(None, metadata.get("bfloat16", "").split(",")))
            prefix = HostPrefix(arrays=arrays, bfloat16=bfloat16)
            if not hmac.compare_digest(metadata.get("hmac", ""), self._hmac(key, prefix)):
                return self._discard(path, "damaged, or of another model, prompt or secret")
            os.utime(path)  # the time of modification orders the eviction
        except Exception as error:  # noqa: BLE001  # whatever a file holds, its prompt is read again
            return self._discard(path, f"unreadable: {error}")
        return prefix

    def save(self, key: str, prefix: HostPrefix) -> None:
        """Write a prefix atomically; evict the least recently used ones to make room."""
        size_bytes = sum(array.nbytes for array in prefix.arrays.values())
        if size_bytes > self._limit_bytes:
            return
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        metadata = {
            "bfloat16": ",".join(sorted(prefix.bfloat16)),
            "hmac": self._hmac(key, prefix),
        }
        try:
            self._evict_for(size_bytes)
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
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _hmac(self, key: str, prefix: HostPrefix) -> str:
        """Authenticate everything that a file says, under its model and its key."""
        code = hmac.new(self._secret, digestmod="sha256")
        for part in (self._model, key, *sorted(prefix.bfloat16)):
            code.update(f"{len(part)}:{part}".encode())
        for name in sorted(prefix.arrays):
            array = np.ascontiguousarray(prefix.arrays[name])
            code.update(f";{len(name)}:{name}:{array.dtype}:{array.shape}".encode())
            code.update(array.data.cast("B") if array.nbytes else b"")
        return code.hexdigest()


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
