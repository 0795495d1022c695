"""Ask listed workers whether they are there: their heartbeat, since they send none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import httpx

from gateway.config.static_workers import ListedWorker
from gateway.connections import authorities
from gateway.control_calls import ATTEMPTS, get
from gateway.errors import WorkerIdTaken
from gateway.fleet.registry import BEAT_S, Fleet
from gateway.fleet.scheduler import Dispatch
from gateway.storage.counters import Store

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.5


class Probes:
    """One task for each listed worker. An async context: it holds them and their connections."""

    def __init__(
        self,
        workers: Sequence[ListedWorker],
        keys: Mapping[str, str],
        fleet: Fleet,
        dispatch: Dispatch,
        store: Store,
    ) -> None:
        self._workers = workers
        self._keys = keys
        self._fleet = fleet
        self._dispatch = dispatch
        self._store = store
        self._silent: set[str] = set()

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(
            timeout=PROBE_TIMEOUT_S, verify=authorities(), trust_env=False
        )
        self._tasks = [
            asyncio.create_task(self._keep_asking(worker), name=f"probe {worker.id}")
            for worker in self._workers
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _keep_asking(self, worker: ListedWorker) -> None:
        """Let a worker beat for as long as it answers; silent for a while, it is out."""
        while True:
            trouble = await self._trouble(worker)
            if not trouble:
                try:
                    self._fleet.beat(worker.report, listed=worker)
                except WorkerIdTaken:
                    trouble = "another worker that joined has its id"
                else:
                    await self._store.keep_report(worker.report)
                    self._dispatch.serve_waiting()
            self._tell(worker, trouble)
            await asyncio.sleep(BEAT_S)

    async def _trouble(self, worker: ListedWorker) -> str:
        """Say what is wrong with a worker; empty when it is there."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S * ATTEMPTS):
                status = await self._status(worker)
        except (httpx.TimeoutException, TimeoutError) as error:
            # A server with one thread cannot answer both us and a request; the limits on requests
            # are what finds out whether it still works on that.
            return "" if self._fleet.requests_of(worker.id) else repr(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end the asking
            return repr(error)
        # Not every server lists its models; but one that wants another key would refuse us always.
        return f"status {status}" if status >= 500 or status in (401, 403) else ""

    async def _status(self, worker: ListedWorker) -> int:
        key = self._keys.get(worker.id)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await get(self._client, f"{worker.url}/v1/models", **headers)
        return answer.status_code

    def _tell(self, worker: ListedWorker, trouble: str) -> None:
        """Log a change, not every beat."""
        if trouble and worker.id not in self._silent:
            self._silent.add(worker.id)
            log.warning("listed.away worker=%s why=%s", worker.id, trouble)
        elif not trouble and worker.id in self._silent:
            self._silent.discard(worker.id)
            log.info("listed.back worker=%s", worker.id)
