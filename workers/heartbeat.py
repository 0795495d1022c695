"""Heartbeats of a worker: reports to a gateway while it runs, and a deletion at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
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

_STATUS_MESSAGES = {
    401: "it has another join token",
    422: "it does not get this worker's report at its URL; check --host and firewalls",
    409: "another worker uses this id; start this one with another --id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One worker's registration at one gateway."""

    gateway_url: str
    token: SecretStr | None
    worker_id: str
    report: Callable[[], WorkerReport]
    changed: asyncio.Event
    """Set to send the next heartbeat at once."""


@contextlib.asynccontextmanager
async def joined(membership: Membership) -> AsyncIterator[None]:
    """Send heartbeats within the context, and leave the gateway at its end."""
    token = membership.token
    async with httpx.AsyncClient(
        base_url=f"{membership.gateway_url}/admin/v1/workers",
        headers={"authorization": f"Bearer {token.get_secret_value()}"} if token else {},
        timeout=REQUEST_TIMEOUT_S,
        trust_env=False,  # a proxy to the internet cannot reach the local network
    ) as client:
        heartbeats = asyncio.create_task(_send_heartbeats(client, membership))
        try:
            yield
        finally:
            heartbeats.cancel()
            await asyncio.wait((heartbeats,))
            await _leave(client, membership)


class HeartbeatRejected(Exception):
    """An error response of the gateway to a heartbeat."""

    def __init__(self, status: int) -> None:
        super().__init__(_STATUS_MESSAGES.get(status, f"it returned status {status}"))


class _HeartbeatResponse(BaseModel):
    interval_s: float = Field(default=2.0, gt=0, le=5)


async def _send_heartbeats(client: httpx.AsyncClient, membership: Membership) -> None:
    """Send heartbeats until cancelled, through any outage of the gateway."""
    while True:
        interval_s = await _send_heartbeat(client, membership)
        await first_of(membership.changed.wait(), timeout_s=interval_s)


async def _send_heartbeat(client: httpx.AsyncClient, membership: Membership) -> float:
    """Send reports, each a new one, until the gateway accepts one; return its interval in s."""
    async for attempt in AsyncRetrying(  # after any error: a worker that gives up is lost
        wait=wait_random_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
        before_sleep=_log_first_failure,
    ):
        with attempt:
            membership.changed.clear()
            report = membership.report()
            response = await client.put(membership.worker_id, json=report.model_dump(mode="json"))
            if response.is_error:
                raise HeartbeatRejected(response.status_code)
    if attempt.retry_state.attempt_number > 1:
        log.info("heartbeat.recovered gateway=%s", membership.gateway_url)
    try:
        return _HeartbeatResponse.model_validate_json(response.content).interval_s
    except ValidationError:
        return _HeartbeatResponse().interval_s


async def _leave(client: httpx.AsyncClient, membership: Membership) -> None:
    try:
        response = await client.delete(membership.worker_id)
        log.info("worker.left gateway=%s status=%d", membership.gateway_url, response.status_code)
    except httpx.HTTPError as error:
        # The gateway removes the worker anyway, once its heartbeats are missing.
        log.warning("worker.leave_failed gateway=%s: %s", membership.gateway_url, error)


def _log_first_failure(state: RetryCallState) -> None:
    """Log the first of consecutive failures: an outage is one event, not hundreds."""
    if state.attempt_number == 1 and state.outcome:
        error = state.outcome.exception()
        log.warning("heartbeat.failed, retrying: %s", error or type(error).__name__)
