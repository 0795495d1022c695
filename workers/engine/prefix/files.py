"""Prefix cache on disk: nodes that memory has evicted, which survive a restart of the worker.

One safetensors file holds one run of tokens. Its name says which tokens come before and how many
it ends with, and has keyed digests of all of them and of their scope, so that the files of a prompt
are found without reading any, and those of a scope are deleted with its key. A file is used only if
a worker with the same secret has written it, which its HMAC proves, and with the same weights. Any
other file is deleted, and the prompt is read again. A file holds no code: no pickle. A file that
nobody has used for a week is deleted.

Reads and writes happen on plain NumPy arrays, outside the engine thread. Workers of one machine may
share a folder and its limits: a lock lets one of them write at a time.

A file also names the keys of its prompts, so that a worker reports them after a restart. They are
hints, so nothing authenticates them.
"""

import contextlib
import fcntl
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from paceline.protocol import PREFIX_FILES_TTL_S, whole_scope

logger = logging.getLogger(__name__)

HostArrays = Mapping[str, np.ndarray[Any, Any]]

_SUFFIX = ".prefix.safetensors"
_NAME = re.compile(r"([0-9a-f]{16})-(\d{1,9})-(\d{1,9})-([0-9a-f]{32})(-resume)?")
_BUDGET = "writes.json"
_MAX_HEADER_BYTES = 1 << 20
_HEADER_BYTES = 1024
_HEADER_BYTES_PER_ARRAY = 256
"""Upper bounds of a file's content besides its arrays."""
_PARTIAL_S = 600.0
"""Age at which a half-written file counts as abandoned."""
_LOCK_S = 2.0
"""A worker that is stopped while it writes holds up no other one for longer."""
_MAX_KEYED_FILES = 4096
_MAX_FILE_KEYS = 16
_KEY = re.compile(r"[!-~]{1,128}")
TTL_S = PREFIX_FILES_TTL_S
_DAY_S = 86_400.0
_WRITES_A_DAY = 4
"""Bytes that may be written in a day, in sizes of the whole cache: an SSD wears out."""


class FileName(NamedTuple):
    """The content of a file: a run of the tokens from `begin` to `end`."""

    begin: int
    end: int
    digest: str
    """Of all tokens from the first to `end`, and of their scope."""
    resumable: bool
    """Whether a row can start at the end of the run."""
    scope: str = ""
    """Keyed digest of the whole isolation scope."""

    def __str__(self) -> str:
        """Return the name without its suffix."""
        resume = "-resume" * self.resumable
        return f"{self.scope}-{self.begin}-{self.end}-{self.digest}{resume}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the name of a file; None for a file that is not from a prefix cache."""
        match = _NAME.fullmatch(text.removesuffix(_SUFFIX)) if text.endswith(_SUFFIX) else None
        if match is None:
            return None
        scope, begin, end, digest, resume = match.groups()
        return cls(int(begin), int(end), digest, resume is not None, scope)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False)
class HostPrefix:
    """A run of tokens without MLX; arrays in bfloat16 are stored as bits."""

    arrays: HostArrays
    """By name: `tokens`, and the arrays of `prefix_tree.Node`."""
    bfloat16: frozenset[str]
    """Names of the arrays in bfloat16."""

    @property
    def size_bytes(self) -> int:
        """Return the size of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


Prefetched: TypeAlias = tuple[FileName, HostPrefix]
"""A run of tokens from disk."""


class PrefixCacheFiles:
    """A directory of runs of one model, evicted least recently used first; safe from any thread."""

    def __init__(self, directory: Path, limit_bytes: int, model: str, secret: bytes) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._model = model
        self._secret = secret
        self._digest_key = blake2b(secret).digest()
        self._failed = False
        """Whether a write has failed, which is logged once."""
        self._names: dict[tuple[int, str], FileName] = {}
        """By end and digest; threads change and copy it as a whole, each time in one operation."""
        self._keys: dict[tuple[int, str], tuple[str, ...]] = {}
        """Keys of prompts, likewise; those of files that are gone stay up to a restart."""
        with self._lock():
            kept = self._evict_for(0)
        for path in directory.glob("*" + _SUFFIX):
            if (name := FileName.parse(path.name)) is not None:
                self._names[name.end, name.digest] = name
        for path in kept[-_MAX_KEYED_FILES:]:
            name = FileName.parse(path.name)
            if name is not None and (keys := _keys_of(path)):
                self._keys[name.end, name.digest] = keys

    @property
    def keys(self) -> Iterator[str]:
        """Yield the keys of prompts whose ends are in files; safe from any thread."""
        for place, keys in tuple(self._keys.items()):
            if place in self._names:
                yield from keys

    def add_keys(self, name: FileName, keys: Sequence[str]) -> None:
        """Report these keys with a file that is there already."""
        known = self._keys.get((name.end, name.digest), ())
        self._keys[name.end, name.digest] = tuple(dict.fromkeys((*keys, *known)))[:_MAX_FILE_KEYS]

    def name(
        self, scope: str, tokens: npt.NDArray[np.int64], begin: int, *, resumable: bool
    ) -> FileName:
        """Return the name of the run from `begin` to the end of `tokens`."""
        digest = self._digest(scope)
        digest.update(tokens.tobytes())
        return FileName(
            begin, len(tokens), digest.hexdigest(), resumable, self._scope_digest(scope)
        )

    def __contains__(self, name: FileName) -> bool:
        """Return whether a file holds the end of this run, and as much of its state."""
        found = self._names.get((name.end, name.digest))
        return found is not None and found.resumable >= name.resumable and self._is_kept(found)

    def find(self, scope: str, tokens: npt.NDArray[np.int64], known: int) -> list[FileName]:
        """Return the files that continue the first `known` tokens, up to the latest start of a row.

        At least one token remains to be read.
        """
        names = dict(self._names)
        digest, at, found = self._digest(scope), 0, {}
        for end in sorted({end for end, _ in names if end < len(tokens)}):
            digest.update(tokens[at:end].tobytes())
            at = end
            name = names.get((end, digest.copy().hexdigest()))
            if name is not None and self._is_kept(name):
                found[end] = name
        for last in sorted(found, reverse=True):
            chain, name = [], found[last] if found[last].resumable else None
            while name is not None and last > known:
                chain.append(name)
                if name.begin <= known:
                    return chain[::-1]
                name = found.get(name.begin)
        return []

    def load(self, name: FileName) -> HostPrefix | None:
        """Read a file; return None if it is missing, and delete it if it is invalid."""
        path = self._path(name)
        if not self._is_kept(name):
            return None
        try:
            if path.stat().st_size > self._limit_bytes + _MAX_HEADER_BYTES:
                self._discard(path, "too large")
                return None
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            bfloat16 = frozenset(filter(None, metadata.get("bfloat16", "").split(",")))
            prefix = HostPrefix(arrays=arrays, bfloat16=bfloat16)
            if not hmac.compare_digest(metadata.get("hmac", ""), self._hmac(str(name), prefix)):
                self._discard(path, "damaged, or of another model, prompt or secret")
                return None
            os.utime(path)  # the time of modification orders the eviction
        except FileNotFoundError:  # another worker has evicted it
            return None
        except Exception as error:  # noqa: BLE001  # whatever a file holds, its prompt is read again
            self._discard(path, f"unreadable: {error}")
            return None
        return prefix

    def save(self, name: FileName, prefix: HostPrefix, keys: Sequence[str] = ()) -> None:
        """Write a file atomically; evict the least recently used ones to make room.

        A disk that takes no file is logged once: only memory then holds the cache.
        """
        keys = keys[:_MAX_FILE_KEYS]
        header_bytes = _HEADER_BYTES + _HEADER_BYTES_PER_ARRAY * len(prefix.arrays)
        size_bytes = prefix.size_bytes + header_bytes + sum(map(len, keys))
        if size_bytes > self._limit_bytes:
            return
        path = self._path(name)
        partial = path.with_suffix(f".{secrets.token_hex(8)}.partial")
        metadata = {
            "bfloat16": ",".join(sorted(prefix.bfloat16)),
            "hmac": self._hmac(str(name), prefix),
            "keys": ",".join(keys),
        }
        try:
            with self._lock():
                if not self._may_write(size_bytes):
                    return
                self._evict_for(size_bytes)
                save_file(dict(prefix.arrays), partial, metadata=metadata)
                partial.chmod(0o600)
                partial.replace(path)
        except Exception as error:  # noqa: BLE001  # safetensors has an error of its own
            if not self._failed:
                logger.warning("prefix_cache.write_failed error=%s", type(error).__name__)
            self._failed = True
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        else:
            self._names[name.end, name.digest] = name
            self.add_keys(name, keys)

    def drop(self, scope: str | None) -> None:
        """Delete all files of a scope, those of other models too; None: all files."""
        tag = "" if scope is None else self._scope_digest(scope)
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                if path.name.startswith(tag) and path.name.endswith((_SUFFIX, ".partial")):
                    self._delete(path)

    def _is_kept(self, name: FileName) -> bool:
        """Return whether a file is there, and somebody has used it in time."""
        with contextlib.suppress(OSError):
            if self._path(name).stat().st_mtime >= time.time() - TTL_S:
                return True
        self._names.pop((name.end, name.digest), None)
        return False

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Let no other worker write to the folder within the context."""
        folder, until_s = os.open(self._directory, os.O_RDONLY), time.monotonic() + _LOCK_S
        try:
            while time.monotonic() < until_s:
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.01)
                    continue
                except OSError:  # a file system without locks
                    pass
                break
            yield
        finally:
            os.close(folder)

    def _may_write(self, size_bytes: int) -> bool:
        """Take bytes of the budget of a day, which the workers of the folder share."""
        begin_s, written_bytes = self._read_budget()
        written_bytes += size_bytes
        if written_bytes > _WRITES_A_DAY * self._limit_bytes:
            return False
        partial = self._directory / f"{_BUDGET}.{secrets.token_hex(8)}.partial"
        partial.touch(mode=0o600)
        partial.write_text(json.dumps({"begin_s": begin_s, "bytes": written_bytes}))
        partial.replace(self._directory / _BUDGET)
        return True

    def _read_budget(self) -> tuple[float, int]:
        """Return when the day of the budget has begun, and the bytes written since."""
        now_s = time.time()
        try:
            stored = json.loads((self._directory / _BUDGET).read_text())
            begin_s, written_bytes = float(stored["begin_s"]), int(stored["bytes"])
        except (OSError, ValueError, TypeError, KeyError):
            return now_s, 0
        return (begin_s, written_bytes) if 0 <= now_s - begin_s < _DAY_S else (now_s, 0)

    def _evict_for(self, size_bytes: int) -> list[Path]:
        """Delete old files, and the least recently used ones until there is room for another.

        Files that workers write count too. Returns the files that stay, the last used one last.
        """
        files, used_bytes, now_s = [], 0, time.time()
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                if not path.name.endswith((_SUFFIX, ".partial")):
                    continue
                with contextlib.suppress(FileNotFoundError):  # another worker has evicted it
                    status = path.stat()
                    used_bytes += status.st_size
                    if path.name.endswith(_SUFFIX):
                        files.append((status.st_mtime, status.st_size, path))
                    elif status.st_mtime < now_s - _PARTIAL_S:
                        used_bytes -= status.st_size
                        self._discard(path, "half written")
        files.sort()
        for number, (modified_s, file_bytes, path) in enumerate(files):
            expired = modified_s < now_s - TTL_S
            if not expired and used_bytes + size_bytes <= self._limit_bytes:
                return [path for *_, path in files[number:]]
            used_bytes -= file_bytes
            self._delete(path)
        return []

    def _discard(self, path: Path, reason: str) -> None:
        logger.warning("prefix_cache.file_discarded file=%s reason=%s", path.name, reason)
        self._delete(path)

    def _delete(self, path: Path) -> None:
        name = FileName.parse(path.name)
        if name is not None:
            self._names.pop((name.end, name.digest), None)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def _path(self, name: FileName) -> Path:
        return self._directory / f"{name}{_SUFFIX}"

    def _digest(self, scope: str) -> blake2b:
        text = f"{self._model}\0{scope}\0"
        return blake2b(text.encode(), key=self._digest_key, digest_size=16)

    def _scope_digest(self, scope: str) -> str:
        whole = whole_scope(scope).encode()  # so that a scope is deleted with all its parts
        return blake2b(whole, key=self._digest_key, digest_size=8, person=b"scope").hexdigest()

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


def _keys_of(path: Path) -> tuple[str, ...]:
    """Return the keys that a file names; none if its header says nothing of the kind."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length <= _MAX_HEADER_BYTES else b"{}"
        keys = json.loads(header)["__metadata__"]["keys"].split(",")[:_MAX_FILE_KEYS]
        return tuple(key for key in keys if _KEY.fullmatch(key))
    return ()
