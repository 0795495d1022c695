"""What an admin makes and nobody may lose: versions of the policy, keys, what they have used.

Few operations, each one a step that Redis can do by itself. In a file they go through one writer at
a time, also over several gateways of one machine, and a file is whole before it is the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from gateway.errors import RecordsUnwritable, StartupError, WriteUnconfirmed

Texts = dict[str, str]
"""Name of a record -> its JSON text, oldest first."""
TextsByKind = dict[str, Texts]

_TIMEOUT_S = 5.0
_Stamp = tuple[int, int, int]
Result = TypeVar("Result")


class Records(Protocol):
    """Records of several kinds, each a JSON text under a name."""

    @property
    def remote(self) -> bool:
        """Say whether they are on another machine, which may be away for a while."""

    def is_current(self, kind: str) -> bool:
        """Say whether `all` tells what is kept; not what is remembered from an earlier life."""

    async def all(self, kind: str) -> Mapping[str, str]:
        """Read all records of a kind by name, oldest first."""

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Keep a new record; say no, and change nothing, where there is one of that name."""

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Keep a record in place of the one of that name, if there is one."""

    async def remove(self, kind: str, name: str) -> None:
        """Forget a record, if there is one of that name."""


class FileRecords:
    """Records in one file; raise `RecordsUnwritable` where a change cannot be kept."""

    remote = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[_Stamp | None, TextsByKind] = (None, {})

    def is_current(self, _kind: str) -> bool:
        """Say that it is what is kept."""
        return True

    def check(self) -> None:
        """Raise `StartupError` where the file is there and cannot be read."""
        try:
            read_file(self._path)
        except (OSError, ValueError):
            raise StartupError(
                f"The state in {self._path} cannot be read; mend it, or move it away to begin anew."
            ) from None

    async def all(self, kind: str) -> Mapping[str, str]:
        """Read all records of a kind by name, oldest first."""
        shelves = await _within_time(self._shelves)
        return dict(shelves.get(kind, {}))

    def _shelves(self) -> TextsByKind:
        """Read the file where it has changed: gateways look again and again at what others did."""
        stamp = _stamp(self._path)
        seen, shelves = self._read
        if stamp is None or stamp != seen:
            shelves = read_file(self._path)
            self._read = (stamp, shelves)
        return shelves

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Keep a new record unless there is one of that name."""
        return await self._change(lambda shelves: _add(shelves, kind, name, text))

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Keep a record in place of the one of that name."""

        def put(shelves: TextsByKind) -> bool:
            shelf = shelves.setdefault(kind, {})
            changed = shelf.get(name) != text
            shelf[name] = text
            return changed

        await self._change(put)

    async def remove(self, kind: str, name: str) -> None:
        """Forget a record."""
        await self._change(lambda shelves: shelves.get(kind, {}).pop(name, None) is not None)

    async def _change(self, change: Callable[[TextsByKind], bool]) -> bool:
        """Read, change and write in one step; say whether anything was changed."""

        def run() -> bool:
            with exclusive_writer(self._path):
                shelves = read_file(self._path)
                changed = change(shelves)
                if changed:
                    write_file(self._path, shelves)
                return changed

        return await _within_time(run, WriteUnconfirmed)


async def _within_time(
    work: Callable[[], Result], late: type[RecordsUnwritable] = RecordsUnwritable
) -> Result:
    """Do blocking work on a thread of its own; a disk that hangs makes nobody wait for ever."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.to_thread(work)
    except TimeoutError as error:
        raise late from error
    except (OSError, ValueError) as error:
        raise RecordsUnwritable from error


def _add(shelves: TextsByKind, kind: str, name: str, text: str) -> bool:
    shelf = shelves.setdefault(kind, {})
    if name in shelf:
        return False
    shelf[name] = text
    return True


def _stamp(path: Path) -> _Stamp | None:
    """Tell one state of a file from another: each is written as a new file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_file(path: Path) -> TextsByKind:
    """Read the whole file; nothing is there before the first write. Raise `ValueError`."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(told, dict) or not all(isinstance(shelf, dict) for shelf in told.values()):
        raise ValueError("not a file of records")
    return {
        kind: {name: json.dumps(record) for name, record in shelf.items()}
        for kind, shelf in told.items()
    }


def write_file(path: Path, shelves: TextsByKind) -> None:
    """Write beside, then put in place: at every moment there is a whole file."""
    told = {
        kind: {name: json.loads(text) for name, text in shelf.items()}
        for kind, shelf in shelves.items()
    }
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(told, file, ensure_ascii=False, indent=1)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive_writer(path: Path) -> Iterator[None]:
    """Keep all others out, those of other processes too, for as long as the context lasts."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
