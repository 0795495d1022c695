"""Heartbeats: a worker keeps a gateway told that it lives, and says goodbye when it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, Field, SecretStr, ValidationError
from tenacity import AsyncRetrying, RetryCallState, wait_random_exponential

from workers.protocol import WorkerReport

log = logging.getLogger(__name__)

BEAT_TIMEOUT_S = 5.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
"""A gateway that comes back knows all its workers within this time."""

_REFUSALS = {
    401: "the join token is not this gateway's",
    409: "another worker has this id; give this one another --id",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Which gateway is told, as whom, and what."""

    gateway_url: str
    token: SecretStr | None
    worker_id: str
    report: Callable[[], WorkerReport]
    changed: asyncio.Event
    """Set by others when a beat should not wait."""

    @property
    def path(self) -> str:
        """The resource of this worker at the gateway."""
        return f"/admin/v1/workers/{self.worker_id}"


class BeatRefused(Exception):
    """The gateway answered a heartbeat with anything but yes."""

    def __init__(self, status: int) -> None:
        super().__init__(_REFUSALS.get(status, f"it answered {status}"))


class _BeatAnswer(BaseModel):
    interval_s: float = Field(default=2.0, gt=0, le=5)


async def keep_joined(membership: Membership) -> None:
    """Beat until cancelled, through any outage of the gateway; then leave."""
    token = membership.token
    async with httpx.AsyncClient(
        base_url=membership.gateway_url,
        headers={"authorization": f"Bearer {token.get_secret_value()}"} if token else {},
        timeout=BEAT_TIMEOUT_S,
        trust_env=False,  # a proxy for the internet does not know the machines on the shelf
    ) as client:
        try:
            while True:
                interval_s = await _beat_until_heard(client, membership)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await membership.changed.wait()
        finally:
            await _leave(client, membership)


async def _beat_until_heard(client: httpx.AsyncClient, membership: Membership) -> float:
    """Send reports, each one fresh, until the gateway takes one; return its wished interval."""
    async for attempt in AsyncRetrying(  # whatever it was: a worker that falls silent is out
        wait=wait_random_exponential(multiplier=FIRST_RETRY_S, max=LONGEST_RETRY_S),
        before_sleep=_log_first_failure,
    ):
        with attempt:
            membership.changed.clear()
            report = membership.report()
            answer = await client.put(membership.path, json=report.model_dump(mode="json"))
            if answer.is_error:
                raise BeatRefused(answer.status_code)
    if attempt.retry_state.attempt_number > 1:
        log.info("join.heard gateway=%s", membership.gateway_url)
    try:
        return _BeatAnswer.model_validate_json(answer.content).interval_s
    except ValidationError:
        return _BeatAnswer().interval_s


async def _leave(client: httpx.AsyncClient, membership: Membership) -> None:
    try:
        answer = await client.delete(membership.path)
        log.info("join.left gateway=%s status=%d", membership.gateway_url, answer.status_code)
    except httpx.HTTPError as error:
        # It will notice by the silence.
        log.warning("join.leave_unheard gateway=%s: %s", membership.gateway_url, error)


def _log_first_failure(state: RetryCallState) -> None:
    """Log the first failure of a row of them: an outage is one event, not hundreds."""
    if state.attempt_number == 1 and state.outcome:
        error = state.outcome.exception()
        log.warning("join.unheard, trying again until heard: %s", error or type(error).__name__)
