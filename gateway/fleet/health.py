"""Ask workers about themselves: short calls beside the data plane, with retries and a deadline."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self

import httpx
from pydantic_core import from_json

from gateway.config.settings import Settings
from gateway.connections import authorities
from gateway.control_calls import get
from gateway.fleet.registry import Fleet
from gateway.storage.counters import Store
from workers.protocol import WorkerReport

log = logging.getLogger(__name__)

REFRESH_TIMEOUT_S = 0.5


class Control:
    """The control calls to workers. An async context: it holds the connections."""

    def __init__(self, settings: Settings, fleet: Fleet, store: Store) -> None:
        self._fleet = fleet
        self._store = store
        token = settings.join_token
        self._headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(
            headers=self._headers,
            timeout=REFRESH_TIMEOUT_S,
            # Nobody reads a connection between two questions, so nobody would see it end.
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=authorities(),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def refresh(self) -> None:
        """Ask every live worker for its report, so that sums are those of this moment.

        A worker that does not answer in time keeps its last report.
        """
        joined = [member for member in self._fleet.members() if member.listed is None]
        reports = await asyncio.gather(*(self._ask(member.report) for member in joined))
        for report in reports:
            if report is not None:
                self._fleet.refresh(report)
                await self._store.keep_report(report)

    async def knock_at(self, worker_id: str) -> None:
        """Ask one worker how it is, by its name; nobody asks those that are listed by hand."""
        for member in self._fleet.members():
            if member.report.worker_id == worker_id and member.listed is None:
                await self.knock(member.report)

    async def knock(self, worker: WorkerReport) -> bool:
        """Ask one worker whether it is there; its answer counts as a heartbeat."""
        report = await self._ask(worker)
        if report is None:
            return False
        self._fleet.vouch(report)
        await self._store.keep_report(report)
        return True

    async def _ask(self, worker: WorkerReport) -> WorkerReport | None:
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                answer = await get(self._client, f"{worker.url}/v1/status")
            answer.raise_for_status()
            report = WorkerReport.model_validate(from_json(answer.content)["report"])
        # Whatever one worker makes the client library raise (a connection reset as it is made is an
        # AttributeError to it), the others' state is still to be told.
        except Exception as error:  # noqa: BLE001
            # Its text alone: who keeps the error of a broken connection keeps its file open.
            log.warning("refresh.failed worker=%s error=%s", worker.worker_id, repr(error))
            return None
        return report if report.worker_id == worker.worker_id else None
