"""The reports that Paceline's workers return on demand."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import httpx
from pydantic_core import from_json
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_fixed

from gateway.engines.paceline import REPORT_PATH, PacelineWorker
from gateway.fleet.registry import ABSENCE_LIMIT_S, WorkerRegistry, is_local, speaks_tls
from gateway.periodic import SharedRuns
from gateway.state.shared_counters import CounterStore
from gateway.strict_json import Pieces, size_of
from paceline.http import certificate_authorities, system_error
from paceline.protocol import CHECKS, MAX_REPORT_BYTES, PREFIX_CACHE_PATH, WorkerReport

log = logging.getLogger(__name__)

CALL_BACK_TIMEOUT_S = 3.0
"""Shorter than a worker waits for the response to its heartbeat."""
REPORT_TIMEOUT_S = 0.5
DELETION_TIMEOUT_S = 10.0
"""Deletions wait for a step of the engine, and for files."""
CHECK_TIMEOUT_S = 20.0
"""A worker renders the prompt, decodes its pictures and compiles its schema (10 s at most)."""
CHECK_REFUSALS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
"""The statuses of a check that refuse the request; others concern the worker."""
MAX_ATTEMPTS = 2
_MAX_CALL_BACKS = 64
# Later another machine may have its address, and the question carries the token.
_ASK_WITHIN_S = 600.0
_RETRY_DELAY_S = 0.05
TIMEOUTS = (httpx.TimeoutException, TimeoutError)


class ReportClient:
    """Requests reports from workers that send heartbeats, within `client` and `paired_client`."""

    def __init__(
        self,
        backend: PacelineWorker,
        fleet: WorkerRegistry,
        store: CounterStore,
        fleet_tls: ssl.SSLContext,
    ) -> None:
        self._authorization_of = backend.authorization_of
        self._server_name = backend.server_name
        self._fleet = fleet
        self._store = store
        self._call_backs = asyncio.Semaphore(_MAX_CALL_BACKS)
        self.refresh_all = SharedRuns(self._refresh_all)
        """Updates the reports of all live workers, once for all who call at a time."""
        client = functools.partial(
            httpx.AsyncClient,
            # Not compressed: a small response could hold a large report.
            headers={"accept-encoding": "identity"},
            timeout=CALL_BACK_TIMEOUT_S,
            # No task reads an idle connection, so the end of one would go unnoticed.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )
        self.client = client(verify=certificate_authorities())
        self.paired_client = client(verify=fleet_tls)

    async def call_back(self, worker: WorkerReport) -> str:
        """Return why the URL of a report does not answer as that boot; empty if it does.

        The sentence is for the owner of the worker, and for admins.
        """
        if self._server_name(worker.worker_id) and not speaks_tls(worker):
            return _PLAIN
        if self._call_backs.locked():  # the worker sends its heartbeat again
            return "The gateway is checking too many workers at once. It will try again."
        async with self._call_backs:
            try:
                report = await self._fetch(worker, CALL_BACK_TIMEOUT_S)
            except _NoReport as failure:
                return str(failure)
        return "" if report.boot_id == worker.boot_id else _OTHER_PROCESS

    async def check(
        self, worker: WorkerReport, path: str, body: Pieces, headers: Mapping[str, str]
    ) -> tuple[int, Any] | None:
        """Return the status and the body of a worker's check of a request; None without one."""
        url = worker.url + CHECKS + path.removeprefix("/v1")
        headers = {**headers, "content-length": str(size_of(body))}
        client, named = self._client_of(worker)
        ask = functools.partial(client.stream, "POST", url, extensions=named)
        try:
            async with (
                asyncio.timeout(CHECK_TIMEOUT_S),
                ask(content=_each(body), headers=headers, timeout=CHECK_TIMEOUT_S) as response,
            ):
                return response.status_code, from_json(await read_bounded(response))
        except Exception as error:  # noqa: BLE001  # the client library raises arbitrary errors
            log.warning("check.failed worker=%s error=%s", worker.worker_id, type(error).__name__)
            return None

    async def delete_prefixes(self, worker: WorkerReport, scopes: Sequence[str]) -> bool:
        """Return whether a worker has deleted its cache of isolation scopes; none: of all."""
        params = {"scope": list(scopes)}
        client, named = self._client_of(worker)
        try:
            async with asyncio.timeout(DELETION_TIMEOUT_S):
                response = await client.delete(
                    worker.url + PREFIX_CACHE_PATH,
                    params=params,
                    headers=self._authorization_of(worker.worker_id),
                    timeout=DELETION_TIMEOUT_S,
                    extensions=named,
                )
        except Exception as error:  # noqa: BLE001  # the client library raises arbitrary errors
            why = type(error).__name__
            log.warning("prefix_cache.not_deleted worker=%s error=%s", worker.worker_id, why)
            return False
        return response.status_code == httpx.codes.NO_CONTENT

    async def _refresh_all(self) -> None:
        """Update the reports of all live workers; after a timeout the last report stays."""
        current = [
            self._record(one.report, self._fleet.update_report)
            for one in self._fleet.workers()
            if one.backend.sends_reports and one.confirmed and not one.problem
        ]
        await asyncio.gather(*current)

    async def probe(self, worker: WorkerReport) -> None:
        """Probe a worker; its answer counts as a heartbeat."""
        await self._record(worker, self._fleet.probe_succeeded)

    async def recall(self, known: Iterable[tuple[WorkerReport, float]]) -> None:
        """Ask workers, by their last reports and the seconds since; record missing ones.

        Whoever starts this gateway again, starts the workers of this machine again too.
        """
        unknown = [
            (report, age_s)
            for report, age_s in known
            if age_s < ABSENCE_LIMIT_S and self._fleet.get(report.worker_id) is None
            if self._fleet.absence(report.worker_id) is None
        ]
        record = self._fleet.probe_succeeded
        asked = [report for report, age_s in unknown if age_s < _ASK_WITHIN_S]
        await asyncio.gather(*(self._record(one, record, logging.DEBUG) for one in asked))
        for report, age_s in unknown:
            if not is_local(report) and self._fleet.get(report.worker_id) is None:
                self._fleet.add_absence(report, "silent", age_s)

    async def _record(
        self,
        worker: WorkerReport,
        record: Callable[[WorkerReport], None],
        level: int = logging.WARNING,
    ) -> None:
        """Record the present report of a worker, if it arrives in time; else log that."""
        try:
            report = await self._fetch(worker, REPORT_TIMEOUT_S)
        except _NoReport as failure:
            log.log(level, "report.failed worker=%s error=%s", worker.worker_id, failure.detail)
        else:
            record(report)
            await self._store.store_report(report)

    async def _fetch(self, worker: WorkerReport, timeout_s: float) -> WorkerReport:
        """Return the present report of a worker; raise `_NoReport`."""
        url = worker.url + REPORT_PATH
        client, named = self._client_of(worker)
        try:
            async with asyncio.timeout(timeout_s):
                headers = self._authorization_of(worker.worker_id)
                response, body = await fetch(client, "GET", url, headers, extensions=named)
            if (status := response.status_code) != httpx.codes.OK:
                rejected = status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
                raise _NoReport(_OTHER_TOKEN if rejected else _OTHER_PROGRAM, f"status {status}")
            report = WorkerReport.model_validate(from_json(body)["report"])
            if report.worker_id != worker.worker_id:
                raise _NoReport(_OTHER_PROCESS, "another worker")
        except _NoReport:
            raise
        # The client library raises arbitrary errors, such as AttributeError for a connection that
        # is reset while it is made; the reports of other workers must still arrive.
        except Exception as error:  # noqa: BLE001
            # No text: it may quote the answer. A stored exception would keep its connection open.
            raise _NoReport(_problem(error), type(error).__name__) from None
        # It has answered at this URL. It may name another one, which faces another gateway.
        return report.model_copy(update={"url": worker.url})

    def _client_of(self, worker: WorkerReport) -> tuple[httpx.AsyncClient, dict[str, str]]:
        """Return the client for a worker, and the option with the name in its certificate."""
        name = self._server_name(worker.worker_id)
        return (self.paired_client, {"sni_hostname": name}) if name else (self.client, {})


class _NoReport(Exception):
    """A worker's URL returned no report of that worker.

    The message is for people, `detail` for the log.
    """

    def __init__(self, problem: str, detail: str) -> None:
        super().__init__(problem)
        self.detail = detail


_FIREWALL = (
    "No answer came from the worker's address: a firewall may block its port. On macOS, "
    "allow incoming connections for Python: System Settings > Network > Firewall > Options."
)
_NO_ROUTE = (
    "The gateway has no route to the worker's address. On macOS, allow Local Network for the "
    "terminals of gateway and worker: System Settings > Privacy & Security > Local Network."
)
_REFUSED = (
    "The worker's address refuses the gateway's connection. Nothing listens there, or a firewall "
    "rejects it. Check --host and --port of the worker."
)
_NO_NAME = "The gateway cannot resolve the worker's name. Start the worker with an IP as --host."
_OTHER_TOKEN = "The program at the worker's address has another join token."  # noqa: S105
_PLAIN = (
    "The worker has a certificate of the fleet, but its address speaks plain HTTP. Update the "
    "worker, or pair it again: paceline join"
)
_NOT_ITS_CERTIFICATE = (
    "The program at the worker's address does not show a certificate that this gateway trusts, or "
    "a clock is wrong. Compare the clocks of both Macs, then pair the worker again: paceline join"
)
_OTHER_PROGRAM = "The program at the worker's address is not a worker."
_OTHER_PROCESS = "Another worker, or an earlier run of this one, answers at the worker's address."
_PROBLEMS = {
    errno.ECONNREFUSED: _REFUSED,
    errno.ETIMEDOUT: _FIREWALL,
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
}


def _problem(error: BaseException) -> str:
    """Return the reason for an error of the client library, and its remedy."""
    if isinstance(error, TIMEOUTS):
        return _FIREWALL
    match system_error(error):
        case socket.gaierror():
            return _NO_NAME
        case ssl.SSLError():
            return _NOT_ITS_CERTIFICATE
        case OSError(errno=number) if number in _PROBLEMS:
            return _PROBLEMS[number]
    return _OTHER_PROGRAM


async def fetch(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    *,
    extensions: dict[str, str] | None = None,
) -> tuple[httpx.Response, bytes]:
    """Return a response and the first bytes of its body; ask twice if the connection breaks.

    Raise the arbitrary errors of the client library. The caller limits the time of both attempts.
    """

    async def ask() -> tuple[httpx.Response, bytes]:
        async with client.stream(
            method, url, headers=headers, content=content, extensions=extensions
        ) as response:
            return response, await read_bounded(response)

    retrying = AsyncRetrying(
        stop=stop_after_attempt(MAX_ATTEMPTS),
        wait=wait_fixed(_RETRY_DELAY_S),
        retry=retry_if_exception(
            lambda error: isinstance(error, Exception) and not isinstance(error, TIMEOUTS)
        ),
        reraise=True,
    )
    return await retrying(ask)


async def read_bounded(response: httpx.Response) -> bytes:
    """Return the body up to the size of the largest report."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_REPORT_BYTES:
            break  # as JSON, what has come is incomplete
    return bytes(body[:MAX_REPORT_BYTES])


async def _each(pieces: Pieces) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
