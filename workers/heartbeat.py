"""Joining gateways: a question before the start, heartbeats with reports, a deletion at the end.

Each address of the name in `--join` is a gateway, whose heartbeats do not wait for the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

from paceline.addresses import WILDCARDS, base_url
from paceline.http import certificate_authorities, system_error
from paceline.lifecycle import first_of
from paceline.protocol import PAIRING_ENDED, PROTOCOL, WorkerReport, speaks

if TYPE_CHECKING:
    from workers.identity import WorkerIdentity

log = logging.getLogger(__name__)

# A Mac that returns to the network is used again within 10 s: a heartbeat that began before has
# at most the connect timeout left, and then waits for its retry.
REQUEST_TIMEOUT = httpx.Timeout(5.0, connect=2.0)
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
"""A gateway that restarts has the reports of all its workers within this time."""
_BACKOFF = wait_random_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S)
REPEAT_AFTER_S = 60.0
"""A state that lasts is logged again after so long."""
RESOLVE_INTERVAL_S = 2.0
MAX_ADDRESSES = 16
_PASSING = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)
"""Beside errors of a server: a gateway or a proxy may return another status later."""
_TAKEN_LOOKS = 6
"""Requests, 2 s apart, for an id in use: a gateway forgets a worker that has died sooner."""
_INTERVAL_S, _LONGEST_INTERVAL_S = 2.0, 5.0
"""Between two heartbeats, unless the gateway says otherwise, within bounds."""

_LOCAL_NETWORK = (
    "on macOS, allow Local Network for this terminal (System Settings > Privacy & Security)"
)


class NotAdmitted(Exception):
    """The gateway will never accept this worker; the message is for the person who starts it."""


def wait_for_gateway(
    url: str,
    token: SecretStr | None,
    worker_id: str,
    worker_url: str,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Ask a gateway whether this worker may join; wait for it if it cannot be reached.

    Raise `NotAdmitted` for another join token or protocol, if no gateway answers at the URL, or if
    another worker still uses the id: an earlier process of this one is forgotten soon.
    `pause` waits for that many seconds, and may raise to end the wait.
    """
    waiting, taken = _RepeatedLog("gateway.unreachable, waiting for it"), 0
    with httpx.Client(
        headers=_authorization(token),
        timeout=REQUEST_TIMEOUT,
        verify=certificate_authorities(),
        trust_env=False,
    ) as client:
        while True:
            try:
                path = f"{url}/admin/v1/workers/{worker_id}/protocol"
                response = client.get(path, params={"url": worker_url})
            except httpx.TransportError as error:
                waiting.log(f"{url}: {_describe(error)}")
            else:
                passing = response.is_server_error or response.status_code in _PASSING
                if response.status_code == httpx.codes.CONFLICT:
                    taken += 1
                    passing = taken < _TAKEN_LOOKS
                if not passing:
                    _check_admission(response, url, token)
                    return
                waiting.log(f"{url}: {_rejection(response)}")
            pause(LONGEST_RETRY_S)


def _check_admission(response: httpx.Response, url: str, token: SecretStr | None) -> None:
    """Raise `NotAdmitted` unless a gateway has answered that speaks the worker's protocol."""
    if _error_code(response) == PAIRING_ENDED:
        raise NotAdmitted(
            f"The gateway at {url} has ended the pairing of this worker. Run `paceline join {url}`."
        )
    if response.status_code == httpx.codes.UNAUTHORIZED:
        problem = "has another join token" if token else "needs its join token"
        raise NotAdmitted(
            f"The gateway at {url} {problem}. Set PACELINE_JOIN_TOKEN, or use --token, with the "
            "gateway's PACELINE_JOIN_TOKEN, or else the content of ~/.paceline/join-token on its "
            "machine."
        )
    if response.status_code == httpx.codes.CONFLICT:
        raise NotAdmitted(
            f"The gateway at {url} does not admit this worker: {_rejection(response)}."
        )
    if response.status_code != httpx.codes.OK:
        raise NotAdmitted(f"No gateway answers at {url}: {_rejection(response)}. Check --join.")
    protocol = _json_of(response).get("protocol")
    if type(protocol) is not int:
        raise NotAdmitted(f"No gateway answers at {url}, but another program. Check --join.")
    if not speaks(protocol):
        older = "gateway" if protocol < PROTOCOL else "worker"
        raise NotAdmitted(
            f"The gateway at {url} speaks protocol {protocol} and this worker {PROTOCOL}; they may "
            f"differ by one. Update this {older}."
        )


def _json_of(response: httpx.Response) -> Mapping[str, Any]:
    """Return the object in the body of a response; empty without one."""
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, Mapping) else {}


def _error_code(response: httpx.Response) -> object:
    """Return the code of an error response; None if it has none."""
    error = _json_of(response).get("error")
    return error.get("code") if isinstance(error, Mapping) else None


class _RepeatedLog:
    """Logs a state once, again if its reason changes, and seldom while it lasts."""

    def __init__(self, event: str) -> None:
        self._event = event
        self._reason = ""
        self._logged_s = 0.0

    def log(self, reason: str) -> None:
        now_s = time.monotonic()
        if reason != self._reason or now_s - self._logged_s >= REPEAT_AFTER_S:
            self._reason, self._logged_s = reason, now_s
            log.warning("%s: %s", self._event, reason)

    def clear(self) -> bool:
        """Forget the state; return whether it was logged."""
        logged, self._reason = bool(self._reason), ""
        return logged


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
    port: int | None = None
    """Each gateway is given the address that faces it now, with this port. None: the URL of the
    report, which the owner has set."""
    identity: WorkerIdentity | None = None
    """That of a paired worker."""


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
    url = httpx.URL(membership.gateway_url)
    async with httpx.AsyncClient(
        headers=_authorization(membership.token),
        timeout=REQUEST_TIMEOUT,
        # After sleep, or with another address, an idle connection is dead and nothing says so.
        limits=httpx.Limits(max_keepalive_connections=0),
        verify=certificate_authorities(),
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


class PairingEnded(HeartbeatRejected):
    """The gateway has ended the pairing of this worker."""


def _next_attempt_s(state: RetryCallState) -> float:
    """Return the wait before the next heartbeat; an admin who ends a pairing wants no more."""
    ended = state.outcome is not None and isinstance(state.outcome.exception(), PairingEnded)
    return REPEAT_AFTER_S if ended else _BACKOFF(state)


def _rejection(response: httpx.Response) -> str:
    """Return why a gateway rejects a request of this worker: in our words, else in its own."""
    match response.status_code, _json_of(response):
        case httpx.codes.UNAUTHORIZED, {"error": {"code": str(code)}} if code == PAIRING_ENDED:
            return "it has ended the pairing of this worker; `paceline join` pairs it again"
        case httpx.codes.UNAUTHORIZED, _:
            return "it has another join token"
        case httpx.codes.CONFLICT, _:
            return "another worker uses this id; start this one with another --id"
        case _, {"error": {"message": str() as message}}:
            return message[:1000]
    return f"it returned status {response.status_code}"


def _describe(error: BaseException) -> str:
    """Return the reason for an error, and the cure of a local network that macOS blocks."""
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    match system_error(error):
        case socket.gaierror():
            return "its name cannot be resolved"
        case OSError(errno=errno.EHOSTUNREACH) if sys.platform == "darwin":
            return f"{os.strerror(errno.EHOSTUNREACH)}; {_LOCAL_NETWORK}"
        case OSError(errno=int() as number):
            return os.strerror(number)
    return str(error) or type(error).__name__


def _authorization(token: SecretStr | None) -> dict[str, str]:
    return {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}


def advertised_url(host: str, port: int, gateway_url: str | None) -> str:
    """Return the URL at which a gateway can reach a worker that listens on `host`."""
    if host in WILDCARDS:
        host = socket.gethostname()
        if gateway_url:
            with contextlib.suppress(OSError):  # without a route now, heartbeats name it later
                found = socket.getaddrinfo(httpx.URL(gateway_url).host, None)
                host = source_address(str(found[0][4][0]))
    return base_url(host, port)


def source_address(address: str) -> str:
    """Return this machine's address on the route to another; raise OSError without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # selects the route; a datagram socket sends nothing here
        return str(probe.getsockname()[0])


class _Gateway:
    """The gateway at one address."""

    def __init__(
        self, client: httpx.AsyncClient, membership: Membership, url: httpx.URL, address: str
    ) -> None:
        self._client = client
        self._address = address
        self._membership = membership
        path = f"{url.path.rstrip('/')}/admin/v1/workers/{membership.worker_id}"
        self._url = url.copy_with(host=address, path=path)
        # The gateway is called by its name all the same, and its certificate has the name.
        self._host = {"host": url.netloc.decode()}
        self._tls = {"sni_hostname": url.raw_host.decode()}
        self._name = f"{url} ({address})"
        self._failing = _RepeatedLog("heartbeat.failed, retrying")
        self._joined = False
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
            wait=_next_attempt_s,
            before_sleep=self._log_failure,  # once: an outage is one event, not hundreds
        ):
            with attempt:
                self.changed.clear()
                response = await self._request("PUT", self._report().model_dump(mode="json"))
                if response.is_error:
                    ended = _error_code(response) == PAIRING_ENDED
                    raise (PairingEnded if ended else HeartbeatRejected)(_rejection(response))
        if self._failing.clear():
            log.info("heartbeat.recovered gateway=%s", self._name)
        elif not self._joined:
            log.info("worker.joined gateway=%s", self._name)
        self._joined = True
        answer = _json_of(response)
        if self._membership.identity is not None:
            self._membership.identity.apply(answer)
        interval_s = answer.get("interval_s")
        if isinstance(interval_s, int | float) and 0 < interval_s <= _LONGEST_INTERVAL_S:
            return interval_s
        return _INTERVAL_S

    async def _request(self, method: str, body: object = None) -> httpx.Response:
        return await self._client.request(
            method, self._url, json=body, headers=self._host, extensions=self._tls
        )

    def _report(self) -> WorkerReport:
        """Return the present report, with the address that faces this gateway now."""
        report, port = self._membership.report(), self._membership.port
        if port is not None:
            url = base_url(source_address(self._address), port)
            report = report.model_copy(update={"url": url})
        identity = self._membership.identity
        return identity.named(report) if identity else report

    def _log_failure(self, state: RetryCallState) -> None:
        if state.outcome and (error := state.outcome.exception()):
            self._failing.log(f"{self._name}: {_describe(error)}")
