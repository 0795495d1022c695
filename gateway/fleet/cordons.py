"""Cordons: the workers that admins send nothing new, kept until they are lifted.

They outlive the worker and this gateway, since what they are for is most often a worker that is
stopped, changed and started again. Gateways that share their records share the cordons.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from gateway.errors import StartupError, WorkerUnknown
from gateway.fleet.health import ReportClient
from gateway.fleet.registry import WorkerRegistry
from gateway.fleet.scheduler import Scheduler
from gateway.storage.records import Records

log = logging.getLogger(__name__)

_KIND = "cordons"
_LOOK_S = 0.1
# Twice a second gateways look at the cordons of others; one look may come late.
_SPREAD_S = 1.2


class Cordon(BaseModel):
    """One worker that gets no new requests."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    since: AwareDatetime
    author: str = "unknown"
    """Who it is by, as they said; cordons of before this was asked have none."""


class Cordons:
    """All cordons; `wall` gives seconds since 1970."""

    def __init__(
        self,
        records: Records,
        fleet: WorkerRegistry,
        dispatch: Scheduler,
        control: ReportClient,
        wall: Callable[[], float],
    ) -> None:
        self._records = records
        self._fleet = fleet
        self._dispatch = dispatch
        self._control = control
        self._wall = wall
        self._reading = asyncio.Lock()
        self.by_worker: Mapping[str, Cordon] = {}

    async def open(self) -> None:
        """Read what is kept; raise `StartupError` where it cannot be understood."""
        try:
            await self.refresh()
        except ValidationError:
            raise StartupError(
                "The kept state names cordons that cannot be understood; mend their records."
            ) from None

    async def refresh(self) -> None:
        """Take over what others have changed."""
        # One after the other: what was read first must not be taken last.
        async with self._reading:
            kept = await self._records.all(_KIND)
            cordons = {name: Cordon.model_validate_json(text) for name, text in kept.items()}
            if cordons != self.by_worker:
                self.by_worker = cordons
                self._fleet.set_cordoned(frozenset(cordons))
                self._dispatch.wake()

    async def add(self, worker_id: str, author: str) -> None:
        """Send a worker nothing new; what runs there goes on. Raise `WorkerUnknown`."""
        if worker_id not in self._known():
            raise WorkerUnknown
        cordon = Cordon(since=datetime.fromtimestamp(int(self._wall()), UTC), author=author)
        if await self._records.add(_KIND, worker_id, cordon.model_dump_json()):
            log.info("worker.cordoned worker=%s by=%r", worker_id, author)
        await self.refresh()

    async def remove(self, worker_id: str, author: str) -> None:
        """Let a worker have requests again, whoever cordoned it; raise `WorkerUnknown`."""
        await self.refresh()  # at another gateway, perhaps just now
        if worker_id not in self._known():
            raise WorkerUnknown
        if worker_id in self.by_worker:
            await self._records.remove(_KIND, worker_id)
            log.info("worker.uncordoned worker=%s by=%r", worker_id, author)
        await self.refresh()

    async def drain(self, worker_id: str, author: str, timeout_s: float) -> bool:
        """Cordon a worker and wait until it has no request; say whether that was seen.

        Raise `WorkerUnknown`. A cordon that is lifted meanwhile, at whichever gateway, ends the
        wait. What other gateways have there is asked of the worker, once all know of the cordon.
        """
        await self.add(worker_id, author)
        shared = self._records.remote
        first_look = int(_SPREAD_S / _LOOK_S) if shared else 0
        for look in range(int(timeout_s / _LOOK_S) + 1):
            if worker_id not in self.by_worker:
                break
            if look >= first_look and not self._fleet.local_requests(worker_id):
                if shared:
                    await self._control.probe_by_id(worker_id)
                if not self._fleet.total_requests(worker_id):
                    return True
            await asyncio.sleep(_LOOK_S)
        return False

    def _known(self) -> set[str]:
        """Name the workers that can be spoken of: those that are here, or were when cordoned."""
        return {member.report.worker_id for member in self._fleet.workers()} | {*self.by_worker}
