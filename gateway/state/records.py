"""Records that no gateway may lose: policy versions, keys, usage, cordons, engines.

The operations are few, and Redis can do each one in one step. A file has one writer at a time, also
among several gateways of one machine, and is replaced as a whole.

Beside Redis the state folder has a copy for times without it. Only a revocation is written to the
copy: nothing else can be edited then, and the last known records stay valid. So a revoked key stays
revoked over a restart. Gateways restore the records that Redis has lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.errors import RecordsUnwritable, StartupError, WriteUnconfirmed
from gateway.state.disk_thread import DiskThread
from gateway.state.redis import UNWRITTEN, RedisClient
from gateway.state.shared_hash import NOW
from gateway.state.shares import EVEN_IF_FULL
from paceline.error_messages import message_of
from paceline.private_files import replace_file

Texts = dict[str, str]
"""The JSON text of each record by its name, oldest first."""
TextsByKind = dict[str, Texts]

Result = TypeVar("Result")
Value = TypeVar("Value")
Model = TypeVar("Model", bound=BaseModel)

log = logging.getLogger(__name__)
_SPARE_BYTES = 4096


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
    """Parses the records of one kind, and skips damaged ones and ones of another version.

    One unreadable record must stop neither a start nor the edits of others. Each is logged once.
    `parse` gets name and text of a record, and raises `ValueError`.
    """

    def __init__(self, records: Records, kind: str, parse: Callable[[str, str], Value]) -> None:
        self.kind = kind
        self._parse = parse
        self._logged: dict[str, str] = {}
        self.skipped: list[str] = []
        """The names of the records of the last read that are not in force."""
        records.readers.append(self)

    def read(self, texts: Mapping[str, str], limit: int | None = None) -> dict[str, Value]:
        """Return the readable records by name, and only so many of them."""
        values: dict[str, Value] = {}
        self.skipped = []
        for name, text in texts.items():
            if len(values) == limit:
                break
            try:
                values[name] = self._parse(name, text)
            except ValueError as error:
                self.skip(name, text, error)
        return values

    def skip(self, name: str, text: str, error: ValueError) -> None:
        """Name a record that is not in force."""
        self.skipped.append(name)
        if self._logged.get(name) != text:
            self._logged[name] = text
            log.error("record.skipped kind=%s name=%r why=%s", self.kind, name, _why(error))


def as_model(model: type[Model]) -> Callable[[str, str], Model]:
    """Return a parser of records of any name as this model."""
    return lambda _, text: model.model_validate_json(text)


def _why(error: ValueError) -> str:
    """Return why a record cannot be read, without its values."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join((*map(str, first["loc"][:1]), message_of(first)))


class FileProblem:
    """Why a file of records cannot be written: for the log, and for admins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.text = ""
        """A sentence with the path; empty while there is no problem, as far as is known."""

    def begin(self, error: Exception) -> None:
        """Record a failure, and log it unless the last call failed alike."""
        reason = "its content is damaged"
        if isinstance(error, OSError):
            reason = os.strerror(error.errno or errno.EIO)
        if isinstance(error, TimeoutError):
            reason = "its disk does not answer in time"
        text = f"{self._path} cannot be written: {reason}."
        if text != self.text:
            self.text = text
            log.warning("records.unwritable problem=%s", text)

    def end(self) -> None:
        """Record a success, and log it after a failure."""
        if self.text:
            self.text = ""
            log.info("records.writable path=%s", self._path)

    def seems_unwritable(self) -> bool:
        """Return whether a write has failed, or probably would; an idle disk may sleep on."""
        try:
            disk = os.statvfs(self._path.parent)
            size_bytes = self._path.stat().st_size if self._path.exists() else 0
        except FileNotFoundError:  # the next write creates the folder
            return bool(self.text)
        needed_bytes = size_bytes + _SPARE_BYTES
        full = disk.f_bavail * disk.f_frsize < needed_bytes or disk.f_flag & os.ST_RDONLY
        return bool(full or self.text) or not os.access(self._path.parent, os.W_OK | os.X_OK)


class FileRecords:
    """Records of several kinds in one file, each a JSON text under a name.

    Edits raise `RecordsUnwritable`; while the file cannot be read, the last known records stay.
    """

    remote = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: object = None
        self._texts: TextsByKind | None = None
        """The last read records; None before the first read."""
        self._held: dict[tuple[str, str], str] = {}
        self._disk = DiskThread("records")
        self.readers: list[RecordReader[Any]] = []
        self._problem = FileProblem(path)

    @property
    def problem(self) -> str:
        """Return why the records cannot be written; empty if they can."""
        held = " Keys revoked since then are refused only until a restart." if self._held else ""
        return self._problem.text and f"{self._problem.text}{held}"

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
        try:
            texts = await self._run(self._read_changes)
        except RecordsUnwritable:
            if self._texts is None:
                raise
            texts = self._texts
        held = {name: text for (of_kind, name), text in self._held.items() if of_kind == kind}
        return {**held, **texts.get(kind, {})}

    def hold(self, kind: str, name: str, text: str) -> None:
        """Return a record that could not be added, and add it once the file can be written."""
        self._held[kind, name] = text

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Store a new record; return False, and change nothing, if the name exists."""
        return await self._change(kind, lambda texts: texts.setdefault(name, text))

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Store a record in place of the one of that name."""
        await self._change(kind, lambda texts: texts.update({name: text}))

    async def remove(self, kind: str, name: str) -> None:
        """Remove a record."""
        await self._change(kind, lambda texts: texts.pop(name, None))

    async def probe(self) -> None:
        """Find out whether the file can be written, by writing it if that seems impossible."""

        def rewrite() -> bool:
            if unwritable := self._problem.seems_unwritable():
                with exclusive_writer(self._path):
                    write_file(self._path, read_file(self._path))
            return unwritable

        if await self._run(rewrite):
            self._problem.end()

    def _read_changes(self) -> TextsByKind:
        """Read the file if it has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return {}
        # They differ after each write, because a write replaces the file.
        stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if self._texts is None or stamp != self._stamp:
            self._texts, self._stamp = read_file(self._path), stamp
        return self._texts

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

        changed = await self._run(run, WriteUnconfirmed)
        self._problem.end()
        return changed

    async def _run(
        self, call: Callable[[], Result], late: type[RecordsUnwritable] = RecordsUnwritable
    ) -> Result:
        try:
            return await self._disk.run(call)
        except (OSError, ValueError) as error:
            self._problem.begin(error)
            if isinstance(error, TimeoutError):
                raise late from error
            raise RecordsUnwritable(f"{UNWRITTEN} {self._problem.text}") from error


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


# One hash for each kind: name -> [order, record], and in the empty field the revision, which grows
# with every change, and the time when the hash was created. Revisions are at least the time in
# milliseconds, so that a hash that was lost and created again has a later one.
_REVISE = f"""{NOW}{EVEN_IF_FULL}
local function revise()
  local stored = redis.call('HGET', KEYS[1], '') or ''
  local last = tonumber(string.match(stored, '^%d+') or '0')
  local created = string.match(stored, ' (%d+)$') or string.format('%.0f', now)
  local revision = string.format('%.0f', math.max(now, last + 1))
  redis.call('HSET', KEYS[1], '', revision .. ' ' .. created)
  return revision
end
"""
_READ = """
local revision = redis.call('HGET', KEYS[1], '') or ''
if revision ~= '' and revision == ARGV[1] then return {revision, {}} end
return {revision, redis.call('HGETALL', KEYS[1])}
"""
_WRITE = f"""{_REVISE}
local name, record, edit = ARGV[1], ARGV[2], ARGV[3]
local stored = redis.call('HGET', KEYS[1], name)
if stored and edit == 'add' then return 0 end
local order = stored and string.match(stored, '^%[(%d+),')
local revision = revise()
redis.call('HSET', KEYS[1], name, '[' .. (order or revision) .. ',' .. record .. ']')
return 1
"""
_REMOVE = f"""{_REVISE}
if redis.call('HDEL', KEYS[1], ARGV[1]) == 1 then revise() end
return 1
"""
_RESTORE = f"""{_REVISE}
local changed = false
for i = 1, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 1 then changed = true end
end
if changed then revise() end
return redis.call('HGET', KEYS[1], '')
"""
_RECORD = re.compile(r"\[(\d+),(.*)\]", re.DOTALL)


class _Record(NamedTuple):
    order: int
    text: str


class _Copy(NamedTuple):
    """The records of one kind in memory."""

    records: Mapping[str, _Record]
    revision: str = ""
    """Empty: the next read is complete."""
    reconnections: int = -1
    """Those of the client when the copy was complete."""
    current: bool = False
    """Read from Redis by this process, not from the file."""
    created: str = ""
    """When the hash was created; empty: not known."""


class RedisRecords:
    """The records that all gateways share; edits raise `RecordsUnwritable`."""

    remote = True

    def __init__(self, redis: RedisClient, folder: Path) -> None:
        self._redis = redis
        self._read, self._write, self._remove, self._restore = (
            redis.script(lua) for lua in (_READ, _WRITE, _REMOVE, _RESTORE)
        )
        self._file = folder / f"shared-{redis.address_digest}.json"
        self._problem = FileProblem(self._file)
        self._copies = defaultdict(lambda: _Copy({}), _read_copies(self._file))
        self._held: defaultdict[str, dict[str, _Record]] = defaultdict(dict)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._writing: asyncio.Task[None] | None = None
        self._file_is_outdated = False
        self._disk = DiskThread("copy of records")
        self.readers: list[RecordReader[Any]] = []

    @property
    def problem(self) -> str:
        """Return why the copy cannot be written; empty if it can."""
        return self._problem.text

    async def probe(self) -> None:
        """Find out whether the copy can be written, by writing it if that seems impossible."""
        with contextlib.suppress(TimeoutError):
            if not await self._disk.run(self._problem.seems_unwritable):
                return
        self._update_file()

    def is_current(self, kind: str) -> bool:
        """Return whether this process has read the kind from Redis."""
        return kind in self._copies and self._copies[kind].current

    async def all(self, kind: str) -> Mapping[str, str]:
        """Return all records of a kind by name, oldest first; from the copy without Redis."""
        if not self._redis.unreachable:
            reading = asyncio.create_task(self._refresh(kind), name=f"read records of {kind}")
            if self.is_current(kind):
                await self._redis.wait_for_admin(reading)
            else:
                await reading  # a start needs records, however long it takes
        return self._texts(kind)

    async def add(self, kind: str, name: str, text: str) -> bool:
        """Store a new record; return False if the name exists."""
        return bool(await self._redis.write(lambda: self._write([_key(kind)], [name, text, "add"])))

    async def replace(self, kind: str, name: str, text: str) -> None:
        """Store a record in place of the one of that name."""
        await self._redis.write(lambda: self._write([_key(kind)], [name, text, "replace"]))

    async def remove(self, kind: str, name: str) -> None:
        """Remove a record."""
        await self._redis.write(lambda: self._remove([_key(kind)], [name]))

    def hold(self, kind: str, name: str, text: str) -> None:
        """Return a record from now on, and add it once Redis takes it."""
        orders = (record.order for record in self._copies[kind].records.values())
        self._held[kind][name] = _Record(max(orders, default=0) + 1, text)
        self._update_file()

    async def _refresh(self, kind: str) -> None:
        """Read a kind; one read after another, so that no older one is stored last."""
        async with self._locks[kind]:
            with contextlib.suppress(RecordsUnwritable):  # `RedisClient` reports it
                await self._read_changes(kind)

    async def _read_changes(self, kind: str) -> None:
        """Update the copy, and restore the records that Redis has lost."""
        part, copy = f"records of {kind}", self._copies[kind]
        held = dict(self._held[kind])
        known = "" if held else copy.revision
        reconnections = self._redis.reconnections
        revision, stored = await self._redis.call(part, lambda: self._ask(kind, known))
        if stored is None:
            self._copies[kind] = copy._replace(reconnections=reconnections, current=True)
            return
        # A record that is missing behind a new connection, in an older hash or in one that was
        # created again, was lost; otherwise it was removed.
        lost = {name: one for name, one in held.items() if name not in stored}
        older = _number(revision) < _number(copy.revision)
        created = revision.partition(" ")[2]
        if reconnections != copy.reconnections or older or copy.created not in ("", created):
            lost |= {name: one for name, one in copy.records.items() if name not in stored}
        records = {**lost, **stored}
        # Valid from here on, even if the restore fails.
        self._copies[kind] = _Copy(
            records, "", copy.reconnections, created=copy.created, current=True
        )
        if lost:
            pairs: list[str] = []
            for name, record in lost.items():
                pairs += [name, f"[{record.order},{record.text}]"]
            restored = await self._redis.call(part, lambda: self._restore([_key(kind)], pairs))
            created = restored.partition(" ")[2]
            log.warning("redis.records_restored kind=%s records=%d", kind, len(lost))
        # After a restore, read all again: another gateway may have written since.
        for name in held:
            self._held[kind].pop(name, None)
        revision = "" if lost else revision
        self._copies[kind] = _Copy(records, revision, reconnections, created=created, current=True)
        if records != copy.records:
            self._update_file()

    async def _ask(self, kind: str, revision: str) -> tuple[str, dict[str, _Record] | None]:
        """Return the latest revision and, if it is another, all records."""
        latest, flat = await self._read([_key(kind)], [revision])
        if revision and latest == revision:
            return latest, None
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return latest, {name: _from_redis(text) for name, text in pairs if name}

    def _texts(self, kind: str) -> Texts:
        records = {**self._held[kind], **self._copies[kind].records}
        in_order = sorted(records.items(), key=lambda item: item[1].order)
        return {name: record.text for name, record in in_order}

    def _update_file(self) -> None:
        self._file_is_outdated = True
        if self._writing is None or self._writing.done():
            # In a task of its own: a slow disk must not delay a revocation.
            self._writing = asyncio.create_task(self._write_copy(), name="copy of records")

    async def _write_copy(self) -> None:
        """Write the copies to the file, for a start without Redis."""
        while self._file_is_outdated:
            self._file_is_outdated = False
            texts = {kind: self._texts(kind) for kind in self._copies}
            try:
                await self._disk.run(functools.partial(self._write_file, texts))
            except (OSError, ValueError) as error:
                self._problem.begin(error)
            else:
                self._problem.end()

    def _write_file(self, texts: TextsByKind) -> None:
        with exclusive_writer(self._file):
            write_file(self._file, texts)


Records = FileRecords | RedisRecords


def _key(kind: str) -> str:
    return f"paceline:{{{kind}}}:records"


def _number(revision: str) -> int:
    return int(revision.partition(" ")[0] or 0)


def _from_redis(text: str) -> _Record:
    """Parse a value; a foreign one becomes a JSON string, which is no valid record of any kind."""
    match = _RECORD.fullmatch(text)
    return _Record(int(match[1]), match[2]) if match else _Record(0, json.dumps(text))


def _read_copies(file: Path) -> dict[str, _Copy]:
    """Read the copies from the file; an unreadable one counts as empty."""
    try:
        kinds = read_file(file)
    except (OSError, ValueError):
        log.warning("redis.copy_unreadable file=%s", file)
        kinds = {}
    return {
        kind: _Copy({name: _Record(order, texts[name]) for order, name in enumerate(texts)})
        for kind, texts in kinds.items()
    }
