"""Fingerprint of a model: digests of all bytes that its caches and answers depend on.

To read tens of gigabytes takes long, so a thread of the lowest priority reads them once, and a file
keeps the digests by size, times and inode. Until then the fingerprint is unknown: the worker takes
nothing from disk or from other workers. A file that changes after the load gets no digest,
since nobody knows which bytes the engine has.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from hashlib import blake2b, sha256
from pathlib import Path
from typing import NamedTuple

_CONFIGURATIONS = (
    *("config.json", "adapter_config.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
_TEXT_CONFIGURATIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)
DIGESTS = "digests.json"
"""The file that keeps digests, in the folder of the prefix cache."""
_PIECE_BYTES = 1 << 23
AT_ONCE_BYTES = 1 << 26
"""Files of fewer bytes are read before the start of an engine, in a fraction of a second."""
_KEPT_DIGESTS = 4096


class Fingerprint(NamedTuple):
    """Distinguishes one model from another."""

    caches: str
    """Digest of all that keys and values depend on: weights, adapter, configurations, MTP head."""
    answers: str
    """Of weights, adapter, tokenizer and chat template."""


class ModelFiles:
    """The files of a model as they are before its load; create it then."""

    def __init__(
        self,
        folder: Path,
        adapter: Path | None = None,
        mtp: Path | None = None,
        *,
        kept: Path | None = None,
    ) -> None:
        """Find the files; `kept` is the file that keeps the digests of weights."""
        self._kept = kept
        self._texts = _digest_of(folder, _TEXT_CONFIGURATIONS)
        parts = [part for part in (folder, adapter, mtp) if part is not None]
        self._configurations = [_digest_of(part, _CONFIGURATIONS) for part in parts]
        self._weights = [
            {path: _identity(path) for path in sorted(part.glob("*.safetensors"))} for part in parts
        ]
        self._answers = 2 if adapter else 1
        """Parts that answers depend on: a head changes none."""
        self._digests = _read(kept)
        if sum(path.stat().st_size for path in self._unknown()) < AT_ONCE_BYTES:
            self.read()

    def fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint; None while a file has no digest."""
        if self._unknown():
            return None
        parts = []
        for configuration, weights in zip(self._configurations, self._weights, strict=True):
            lines = [f"{path.name} {self._digests[key]}" for path, key in weights.items()]
            parts.append("\n".join([configuration, *lines]))
        answers = [*parts[: self._answers], self._texts]
        caches, texts = ("\0".join(one).encode() for one in (parts, answers))
        return Fingerprint(*(blake2b(one, digest_size=16).hexdigest() for one in (caches, texts)))

    def read(self, is_cancelled: Callable[[], bool] = lambda: False) -> Fingerprint | None:
        """Read all files without a digest; None if one has changed since, or at a cancellation."""
        buffer = memoryview(bytearray(_PIECE_BYTES))
        for path, key in self._unknown().items():
            digest = sha256()
            with path.open("rb", buffering=0) as file:
                while length := file.readinto(buffer):
                    if is_cancelled():
                        return None
                    digest.update(buffer[:length])
            if _identity(path) != key:
                return None
            self._digests[key] = digest.hexdigest()
            _keep(self._kept, key, self._digests[key])
        return self.fingerprint()

    def _unknown(self) -> dict[Path, str]:
        every = {path: key for part in self._weights for path, key in part.items()}
        return {path: key for path, key in every.items() if key not in self._digests}


def lower_priority() -> None:
    """Let the thread that calls this run only where others need no processor."""
    if sys.platform == "darwin":
        os.setpriority(3, 0, 0x1000)  # PRIO_DARWIN_THREAD, PRIO_DARWIN_BG: its reads give way too
    else:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"


def _digest_of(folder: Path, names: tuple[str, ...]) -> str:
    digest = blake2b(digest_size=16)
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            content = (folder / name).read_bytes()
            digest.update(f"{name}:{len(content)}".encode() + content)
    return digest.hexdigest()


def _read(kept: Path | None) -> dict[str, str]:
    """Return the digests that are kept; none if the file has anything else."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(kept.read_text()) if kept is not None else {}
        if isinstance(found, dict) and all(type(one) is str for one in found.values()):
            return found
    return {}


def _keep(kept: Path | None, key: str, digest: str) -> None:
    """Keep one more digest, with those of other workers; a full disk costs another reading."""
    if kept is None:
        return
    digests = {**_read(kept), key: digest}
    partial = kept.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        partial.touch(mode=0o600)
        partial.write_text(json.dumps(dict(list(digests.items())[-_KEPT_DIGESTS:])))
        partial.replace(kept)
