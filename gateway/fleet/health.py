"""Ask workers about themselves: short calls beside the data plane, with retries and a deadline.

A question to a worker beside the data plane: asked again once when the connection fails.

Ask listed workers whether they are there: their heartbeat, since they send none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

import httpx
from pydantic_core import from_json
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from gateway.config.settings import Settings
from gateway.config.static_workers import ListedWorker
from gateway.errors import WorkerIdTaken
from gateway.fleet.registry import WorkerRegistry
from gateway.http.upstream import certificate_authorities
from gateway.storage.counters import CounterStore
from workers.protocol import WorkerReport

MAX_ATTEMPTS = 2
_BETWEEN_ATTEMPTS_S = 0.05


async def get_with_retry(client: httpx.AsyncClient, url: str, **headers: str) -> httpx.Response:
    """Return the answer, whatever its status; raise httpx's error of the last attempt.

    The caller limits the time of all attempts together.
    """
    retrying = AsyncRetrying(
        stop=stop_after_attempt(MAX_ATTEMPTS),
        wait=wait_fixed(_BETWEEN_ATTEMPTS_S),
        retry=retry_if_exception_type(httpx.TransportError),
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            answer = await client.get(url, headers=headers)
    return answer


log = logging.getLogger(__name__)
REPORT_TIMEOUT_S = 0.5


class ReportClient:
    """The control calls to workers, within `connected`."""

    def __init__(self, settings: Settings, fleet: WorkerRegistry, store: CounterStore) -> None:
        self._fleet = fleet
        self._store = store
        token = settings.join_token
        self._headers = {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open the connections within the context."""
        async with httpx.AsyncClient(
            headers=self._headers,
            timeout=REPORT_TIMEOUT_S,
            # No task reads an idle connection, so the end of one would go unnoticed.
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=certificate_authorities(),
            trust_env=False,
        ) as self._client:
            yield

    async def refresh_all(self) -> None:
        """Ask every live worker for its report, so that sums are those of this moment.

        A worker that does not answer in time keeps its last report.
        """
        joined = [member for member in self._fleet.workers() if member.listed is None]
        reports = await asyncio.gather(*(self._ask(member.report) for member in joined))
        for report in reports:
            if report is not None:
                self._fleet.update_report(report)
                await self._store.store_report(report)

    async def probe_by_id(self, worker_id: str) -> None:
        """Ask one worker how it is, by its name; nobody asks those that are listed by hand."""
        for member in self._fleet.workers():
            if member.report.worker_id == worker_id and member.listed is None:
                await self.probe(member.report)

    async def probe(self, worker: WorkerReport) -> bool:
        """Ask one worker whether it is there; its answer counts as a heartbeat."""
        report = await self._ask(worker)
        if report is None:
            return False
        self._fleet.probe_succeeded(report)
        await self._store.store_report(report)
        return True

    async def _ask(self, worker: WorkerReport) -> WorkerReport | None:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                answer = await get_with_retry(self._client, f"{worker.url}/v1/status")
            answer.raise_for_status()
            report = WorkerReport.model_validate(from_json(answer.content)["report"])
        # Whatever one worker makes the client library raise (a connection reset as it is made is an
        # AttributeError to it), the others' state is still to be told.
        except Exception as error:  # noqa: BLE001
            # Its text alone: who keeps the error of a broken connection keeps its file open.
            log.warning("refresh.failed worker=%s error=%s", worker.worker_id, repr(error))
            return None
        return report if report.worker_id == worker.worker_id else None


PROBE_TIMEOUT_S = 1.5


class HealthChecker:
    """The health checks of static workers, within `connected`."""

    def __init__(
        self,
        keys: Mapping[str, str],
        fleet: WorkerRegistry,
        store: CounterStore,
    ) -> None:
        self._keys = keys
        self._fleet = fleet
        self._store = store
        self._silent: set[str] = set()

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Open the connections within the context."""
        async with httpx.AsyncClient(
            timeout=PROBE_TIMEOUT_S, verify=certificate_authorities(), trust_env=False
        ) as self._client:
            yield

    async def probe(self, worker: ListedWorker) -> None:
        """Record a heartbeat if the worker answers; called every `HEARTBEAT_INTERVAL_S`."""
        trouble = await self._trouble(worker)
        if not trouble:
            try:
                self._fleet.heartbeat(worker.report, listed=worker)
            except WorkerIdTaken:
                trouble = "another worker that joined has its id"
            else:
                await self._store.store_report(worker.report)
        self._tell(worker, trouble)

    async def _trouble(self, worker: ListedWorker) -> str:
        """Say what is wrong with a worker; empty when it is there."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S * MAX_ATTEMPTS):
                status = await self._status(worker)
        except (httpx.TimeoutException, TimeoutError) as error:
            # A server with one thread cannot answer both us and a request; the limits on requests
            # are what finds out whether it still works on that.
            return "" if self._fleet.local_requests(worker.id) else repr(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it must not end the asking
            return repr(error)
        # Not every server lists its models; but one that wants another key would refuse us always.
        return f"status {status}" if status >= 500 or status in (401, 403) else ""

    async def _status(self, worker: ListedWorker) -> int:
        key = self._keys.get(worker.id)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await get_with_retry(self._client, f"{worker.url}/v1/models", **headers)
        return answer.status_code

    def _tell(self, worker: ListedWorker, trouble: str) -> None:
        """Log a change, not every beat."""
        if trouble and worker.id not in self._silent:
            self._silent.add(worker.id)
            log.warning("listed.away worker=%s why=%s", worker.id, trouble)
        elif not trouble and worker.id in self._silent:
            self._silent.discard(worker.id)
            log.info("listed.back worker=%s", worker.id)
