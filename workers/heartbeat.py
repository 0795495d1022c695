"""Heartbeats of a worker: reports to its gateways while it runs, and a deletion at its end.

Each address of the name in `--join` is a gateway, whose heartbeats do not wait for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, Field, SecretStr, ValidationError
from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

from workers.lifecycle import first_of
from workers.protocol import WorkerReport

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
"""A gateway that restarts has the reports of all its workers within this time."""
RESOLVE_INTERVAL_S = 2.0
MAX_ADDRESSES = 16

_STATUS_MESSAGES = {
    401: "it has another join token",
    422: "it does not get this worker's report at its URL; check --host and firewalls",
    409: "another worker uses this id; start this one with another --id",
}


Resolver = Callable[[httpx.URL], Awaitable[set[str]]]
"""Returns the addresses of the host of a URL; raises an `OSError` or a `UnicodeError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One worker's registration at its gateways."""

    gateway_url: str
    token: SecretStr | None
    worker_id: str
    report: Callable[[], WorkerReport]
    changed: asyncio.Event
    """Set to send the next heartbeats at once."""


async def resolve(url: httpx.URL) -> set[str]:
    """Return the addresses of the host of a URL."""
    found = await asyncio.get_running_loop().getaddrinfo(
        url.raw_host, url.port, type=socket.SOCK_STREAM
    )
    # A URL cannot name the interface of a link-local address.
    return {str(address[0]) for *_, address in found if len(address) == 2 or not address[3]}


@contextlib.asynccontextmanager
async def joined(membership: Membership, resolver: Resolver = resolve) -> AsyncIterator[None]:
    """Send heartbeats within the context, and leave the gateways at its end."""
    token, url = membership.token, httpx.URL(membership.gateway_url)
    async with httpx.AsyncClient(
        headers={"authorization": f"Bearer {token.get_secret_value()}"} if token else {},
        timeout=REQUEST_TIMEOUT_S,
        trust_env=False,  # a proxy to the internet cannot reach the local network
    ) as client:
        gateways: dict[str, _Gateway] = {}
        join = functools.partial(_Gateway, client, membership, url)
        heartbeats = asyncio.create_task(
            _join_all(gateways, join, lambda: resolver(url), membership.changed)
        )
        try:
            yield
        finally:
            heartbeats.cancel()
            await asyncio.wait((heartbeats,))
            await asyncio.gather(*(gateway.leave() for gateway in gateways.values()))


async def _join_all(
    gateways: dict[str, _Gateway],
    join: Callable[[str], _Gateway],
    resolver: Callable[[], Awaitable[set[str]]],
    changed: asyncio.Event,
) -> None:
    """Send heartbeats to the present addresses of the gateways until cancelled."""
    senders: dict[str, asyncio.Task[None]] = {}
    failing = False
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_announce_changes(changed, gateways))
        while True:
            try:
                addresses = set(sorted(await resolver())[:MAX_ADDRESSES])
                failing = False
            except (OSError, UnicodeError) as error:
                addresses = set(gateways)  # those that were found before
                if not failing:
                    log.warning("heartbeat.failed, retrying: %s", error)
                failing = True
            for address in gateways.keys() - addresses:
                del gateways[address]
                senders.pop(address).cancel()
            for address in addresses - gateways.keys():
                gateways[address] = join(address)
                senders[address] = tasks.create_task(gateways[address].send_heartbeats())
            await asyncio.sleep(RESOLVE_INTERVAL_S)


async def _announce_changes(changed: asyncio.Event, gateways: dict[str, _Gateway]) -> None:
    while True:
        await changed.wait()
        changed.clear()
        for gateway in gateways.values():
            gateway.changed.set()


class HeartbeatRejected(Exception):
    """An error response of the gateway to a heartbeat."""

    def __init__(self, status: int) -> None:
        super().__init__(_STATUS_MESSAGES.get(status, f"it returned status {status}"))


class _HeartbeatResponse(BaseModel):
    interval_s: float = Field(default=2.0, gt=0, le=5)


class _Gateway:
    """The gateway at one address."""

    def __init__(
        self, client: httpx.AsyncClient, membership: Membership, url: httpx.URL, address: str
    ) -> None:
        self._client = client
        self._report = membership.report
        path = f"{url.path.rstrip('/')}/admin/v1/workers/{membership.worker_id}"
        self._url = url.copy_with(host=address, path=path)
        # The gateway is called by its name all the same, and its certificate has the name.
        self._host = {"host": url.netloc.decode()}
        self._tls = {"sni_hostname": url.raw_host.decode()}
        self._name = f"{url} ({address})"
        self.changed = asyncio.Event()
        """Set to send the next heartbeat at once."""

    async def send_heartbeats(self) -> None:
        """Send heartbeats until cancelled, through any outage of the gateway."""
        while True:
            interval_s = await self._send_heartbeat()
            await first_of(self.changed.wait(), timeout_s=interval_s)

    async def leave(self) -> None:
        """Remove the worker."""
        try:
            response = await self._request("DELETE")
            log.info("worker.left gateway=%s status=%d", self._name, response.status_code)
        except httpx.HTTPError as error:
            # The gateway removes the worker anyway, once its heartbeats are missing.
            log.warning("worker.leave_failed gateway=%s: %s", self._name, error)

    async def _send_heartbeat(self) -> float:
        """Send reports, each a new one, until the gateway accepts one; return its interval in s."""
        async for attempt in AsyncRetrying(  # after any error: a worker that gives up is lost
            wait=wait_random_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
            before_sleep=self._log_first_failure,
        ):
            with attempt:
                self.changed.clear()
                response = await self._request("PUT", self._report().model_dump(mode="json"))
                if response.is_error:
                    raise HeartbeatRejected(response.status_code)
        if attempt.retry_state.attempt_number > 1:
            log.info("heartbeat.recovered gateway=%s", self._name)
        try:
            return _HeartbeatResponse.model_validate_json(response.content).interval_s
        except ValidationError:
            return _HeartbeatResponse().interval_s

    async def _request(self, method: str, body: object = None) -> httpx.Response:
        return await self._client.request(
            method, self._url, json=body, headers=self._host, extensions=self._tls
        )

    def _log_first_failure(self, state: RetryCallState) -> None:
        """Log the first of consecutive failures: an outage is one event, not hundreds."""
        if state.attempt_number == 1 and state.outcome:
            error = state.outcome.exception()
            reason = error or type(error).__name__
            log.warning("heartbeat.failed, retrying: %s: %s", self._name, reason)
