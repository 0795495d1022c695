"""The engines that admins join at run time, kept as records, beside those of the settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict

from gateway.config.static_workers import StaticWorker, read_worker_key
from gateway.engines.base import EngineSilent, EngineUnusable
from gateway.errors import EngineListed, EngineUnknown, FieldInvalid, StartupError, WorkerIdTaken
from gateway.fleet.engine_watch import EngineWatch, WatchedEngine
from gateway.fleet.registry import WorkerRegistry
from gateway.state.counters import GONE_WORKERS, MAX_WORKERS
from gateway.state.records import RecordReader, Records, RecordTable, as_model

log = logging.getLogger(__name__)

KEY_VARIABLE = re.compile(r"(?!PACELINE_)[A-Z][A-Z0-9_]{0,100}_API_KEY")
"""The variables that an admin may name at run time: not any secret of the gateway's process."""


class EngineRecord(BaseModel):
    """One engine that an admin has joined."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: StaticWorker
    since: AwareDatetime
    author: str = "unknown"


class EngineRecords:
    """All engines that a gateway watches, and the only way to change them at run time.

    `environment` holds the API keys, `wall` returns seconds since 1970.
    """

    def __init__(
        self,
        records: Records,
        settings: Sequence[WatchedEngine],
        watch: EngineWatch,
        fleet: WorkerRegistry,
        *,
        environment: Mapping[str, str],
        wall: Callable[[], float],
    ) -> None:
        self._table = RecordTable(records, "engines", self._apply)
        self._reader = RecordReader(records, "engines", as_model(EngineRecord))
        self._settings = {one.entry.id: one for one in settings}
        self._watch = watch
        self._fleet = fleet
        self._environment = environment
        self._wall = wall
        self.joined: Mapping[str, EngineRecord] = {}
        watch.replace(settings)

    async def refresh(self) -> None:
        """Read the stored engines, and apply the changes of other gateways."""
        await self._table.refresh()

    async def add(self, worker: StaticWorker, author: str) -> WatchedEngine:
        """Ask an engine, join it if it can be used, and return it.

        Raise `EngineListed`, `WorkerIdTaken` or `FieldInvalid`.
        """
        await self.refresh()
        if worker.id in self._settings:
            raise EngineListed
        live = {one.report.worker_id for one in self._fleet.workers() if one.backend.sends_reports}
        if worker.id in live or worker.id in self.joined or worker.id == GONE_WORKERS:
            raise WorkerIdTaken
        if len(self.joined) >= MAX_WORKERS:
            raise FieldInvalid(f"At most {MAX_WORKERS} engines can be joined.", param="url")
        if worker.api_key_env and not KEY_VARIABLE.fullmatch(worker.api_key_env):
            raise FieldInvalid(
                "'api_key_env' must be the name of a variable that ends in _API_KEY and does not "
                "begin with PACELINE_.",
                param="api_key_env",
            )
        watched = self._watched(worker)
        if watched.missing_key:
            raise FieldInvalid(watched.problem, param="api_key_env")
        try:
            await self._watch.examine(watched)
        except EngineSilent as silent:
            raise FieldInvalid(f"The engine does not answer: {silent}.", param="url") from None
        except EngineUnusable as unusable:
            raise FieldInvalid(str(unusable), param="url") from None
        if watched.engine is not None and not watched.engine.names:
            raise FieldInvalid("The engine does not have any of these models.", param="models")
        record = EngineRecord(
            worker=worker, since=datetime.fromtimestamp(int(self._wall()), UTC), author=author
        )
        text = record.model_dump_json()
        if not await self._table.add(worker.id, text):
            if worker.id not in self._reader.skipped:
                raise WorkerIdTaken
            await self._table.replace(worker.id, text)
        log.info("engine.joined worker=%s author=%r", worker.id, author)
        await self._watch.probe_now(worker.id)  # it gets requests from here on
        return self._watch.engines.get(worker.id, watched)

    async def remove(self, worker_id: str, author: str) -> None:
        """Remove an engine, whose running requests continue.

        Raise `EngineListed` or `EngineUnknown`.
        """
        await self.refresh()
        if worker_id in self._settings:
            raise EngineListed
        if worker_id not in self.joined and worker_id not in self._reader.skipped:
            raise EngineUnknown
        await self._table.remove(worker_id)
        log.info("engine.removed worker=%s author=%r", worker_id, author)

    async def _apply(self, texts: Mapping[str, str]) -> None:
        self.joined = {
            name: record
            for name, record in self._reader.read(texts).items()
            if name not in self._settings
        }
        joined = [self._watched(record.worker) for record in self.joined.values()]
        self._watch.replace((*self._settings.values(), *joined))

    def _watched(self, worker: StaticWorker) -> WatchedEngine:
        """Return an engine with its key, or why it lacks one here."""
        if not worker.api_key_env:
            return WatchedEngine(entry=worker)
        try:
            return WatchedEngine(entry=worker, token=read_worker_key(worker, self._environment))
        except StartupError as missing:
            return WatchedEngine(entry=worker, problem=str(missing), missing_key=True)
