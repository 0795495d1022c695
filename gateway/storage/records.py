"""Records of what admins create and no gateway may lose: policy versions, keys, usage, cordons.

The operations are few, and Redis can do each one in one step. A file has one writer at a time, also
among several gateways of one machine, and is replaced as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from gateway.errors import RecordsUnwritable, StartupError, WriteUnconfirmed
from gateway.storage.disk_thread import DiskThread

Texts = dict[str, str]
"""The JSON text of each record by its name, oldest first."""
TextsByKind = dict[str, Texts]

Result = TypeVar("Result")
Value = TypeVar("Value")

log = logging.getLogger(__name__)


class Records(Protocol):
    """Records of several kinds, each a JSON text under a name."""

    @property
    def remote(self) -> bool:
        """Return whether they are on another machine, which may be unreachable."""

    def is_current(self, kind: str) -> bool:
        """Return whether `all` returns the stored records, not a copy of an earlier process."""

    async def all(self, kind: str) -> Mapping[str, str]:
        """Return all records of a kind by name, oldest first."""

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Store a new record; return False, and change nothing, if the name exists."""

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Store a record in place of the one of that name, if there is one."""

    async def remove(self, kind: str, name: str) -> None:
        """Remove a record, if there is one of that name."""

    def hold(self, kind: str, name: str, text: str) -> None:
        """Return a record that could not be added from now on, and add it once that is possible."""


class RecordTable:
    """The records of one kind in memory; `apply` gets them after each change."""

    def __init__(
        self, records: Records, kind: str, apply: Callable[[Mapping[str, str]], Awaitable[None]]
    ) -> None:
        self._records = records
        self._kind = kind
        self._apply = apply
        self._applied: tuple[Mapping[str, str], bool] | None = None
        self._lock = asyncio.Lock()

    @property
    def current(self) -> bool:
        """Return whether the records are the stored ones, not a copy of an earlier process."""
        return self._records.is_current(self._kind)

    async def refresh(self) -> None:
        """Read the records, and apply them if they have changed."""
        # One after another: an older read must not be applied after a newer one.
        async with self._lock:
            read = await self._records.all(self._kind), self.current
            if read != self._applied:
                await self._apply(read[0])
                self._applied = read

    async def add(self, name: str, text: str) -> bool:
        """Store a new record and refresh; return False if the name exists."""
        added = await self._records.add(self._kind, name, text)
        await self.refresh()
        return added

    async def replace(self, name: str, text: str) -> None:
        """Store a record in place of the one of that name, and refresh."""
        await self._records.replace(self._kind, name, text)
        await self.refresh()

    async def remove(self, name: str) -> None:
        """Remove a record and refresh."""
        await self._records.remove(self._kind, name)
        await self.refresh()

    async def hold(self, name: str, text: str) -> None:
        """Apply a record that could not be added, and add it once that is possible."""
        self._records.hold(self._kind, name, text)
        await self.refresh()


class RecordReader(Generic[Value]):
    """Parses the records of one kind, and skips those that are damaged or of a newer version.

    One unreadable record must stop neither a start nor the edits of others. Each is logged once.
    `parse` gets name and text of a record, and raises `ValueError`.
    """

    def __init__(self, kind: str, parse: Callable[[str, str], Value]) -> None:
        self._kind = kind
        self._parse = parse
        self._logged: dict[str, str] = {}

    def read(self, texts: Mapping[str, str]) -> dict[str, Value]:
        """Return the readable records by name."""
        values = {}
        for name, text in texts.items():
            try:
                values[name] = self._parse(name, text)
            except ValueError:
                if self._logged.get(name) != text:
                    self._logged[name] = text
                    log.error("record.skipped kind=%s name=%r", self._kind, name)
        return values


class FileRecords:
    """Records in one file; edits raise `RecordsUnwritable`."""

    remote = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: tuple[object, TextsByKind] = (None, {})
        self._held: dict[tuple[str, str], str] = {}
        self._disk = DiskThread("records")

    def is_current(self, _kind: str) -> bool:
        """Return True: the file is always read."""
        return True

    def check(self) -> None:
        """Raise `StartupError` if the file exists and cannot be read."""
        try:
            read_file(self._path)
        except (OSError, ValueError):
            raise StartupError(
                f"The state in {self._path} cannot be read. Repair it, or remove it to start anew."
            ) from None

    async def all(self, kind: str) -> Mapping[str, str]:
        """Return all records of a kind by name, oldest first."""
        for (of_kind, name), text in tuple(self._held.items()):
            with contextlib.suppress(RecordsUnwritable):
                await self.add(of_kind, name, text)
                self._held.pop((of_kind, name), None)
        texts = await self._run(self._read_changes)
        held = {name: text for (of_kind, name), text in self._held.items() if of_kind == kind}
        return {**held, **texts.get(kind, {})}

    def hold(self, kind: str, name: str, text: str) -> None:
        """Return a record from now on, and add it once the file can be written."""
        self._held[kind, name] = text

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Store a new record unless the name exists."""
        return await self._change(kind, lambda texts: texts.setdefault(name, text))

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Store a record in place of the one of that name."""
        await self._change(kind, lambda texts: texts.update({name: text}))

    async def remove(self, kind: str, name: str) -> None:
        """Remove a record."""
        await self._change(kind, lambda texts: texts.pop(name, None))

    def _read_changes(self) -> TextsByKind:
        """Read the file if it has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return {}
        # They differ after each write, because a write replaces the file.
        stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if stamp != self._read[0]:
            self._read = stamp, read_file(self._path)
        return self._read[1]

    async def _change(self, kind: str, change: Callable[[Texts], object]) -> bool:
        """Read, change and write in one step; return whether anything has changed."""

        def run() -> bool:
            with exclusive_writer(self._path):
                kinds = read_file(self._path)
                texts = kinds.get(kind, {})
                before = dict(texts)
                change(texts)
                if texts != before:
                    write_file(self._path, {**kinds, kind: texts})
                return texts != before

        return await self._run(run, WriteUnconfirmed)

    async def _run(
        self, call: Callable[[], Result], late: type[RecordsUnwritable] = RecordsUnwritable
    ) -> Result:
        try:
            return await self._disk.run(call)
        except TimeoutError as error:
            raise late from error
        except (OSError, ValueError) as error:
            raise RecordsUnwritable from error


def read_file(path: Path) -> TextsByKind:
    """Read the file, which is empty before the first write. Raise `ValueError`."""
    try:
        kinds = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(kinds, dict) or not all(isinstance(one, dict) for one in kinds.values()):
        raise ValueError("not a file of records")
    return {
        kind: {name: json.dumps(record) for name, record in records.items()}
        for kind, records in kinds.items()
    }


def write_file(path: Path, texts: TextsByKind) -> None:
    """Replace the file by these records."""
    kinds = {
        kind: {name: json.loads(text) for name, text in records.items()}
        for kind, records in texts.items()
    }
    replace_file(path, json.dumps(kinds, ensure_ascii=False, indent=1))


def replace_file(path: Path, text: str) -> None:
    """Write a new file and move it into place, so that the file is always complete."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        # The folder too: a power cut must not bring back a revoked key.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive_writer(path: Path) -> Iterator[None]:
    """Lock the file against all other writers, also of other processes."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
