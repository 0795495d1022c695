"""Carry a request to a worker and the answer back: attempts before the first byte, none after."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
from pydantic_core import from_json, to_json
from yarl import URL

from gateway.client import ClientLeft, Headers, Reply
from gateway.domain import Candidate, Decision, Inspected, Usage
from gateway.errors import (
    GatewayError,
    NoWorker,
    RefusedByWorker,
    WorkerBusy,
    WorkerFailed,
    WorkerLost,
    WorkerSilent,
    WorkerUnreachable,
)
from gateway.fleet import Fleet
from gateway.settings import Settings
from gateway.sse import Scanner, read_usage
from policies.profile import Endpoint
from workers.adapters.report import WorkerReport

log = logging.getLogger(__name__)

_PATHS = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETIONS: "/v1/completions"}
# Shorter than uvicorn's 5 s for idle connections: we never write into one that is closing.
_IDLE_CONNECTION_S = 3.0
_REFUSALS = frozenset((400, 413, 422))
_BUSY = frozenset((429, 503))
_ERROR_LIMIT_BYTES = 64 * 1024
_ONE_PIECE_BYTES = 256 * 1024
_RETRY_AFTER_RANGE_S = (1.0, 60.0)
# How exact the limit on pauses is: a new timer for every event would cost more than the relay.
_RENEW_IDLE_S = 1.0
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front must not collect events
)


@dataclass(slots=True, kw_only=True)
class Trip:
    """One request on its way, and what happened to it so far: kept here, read by accounting."""

    identity: str
    inspected: Inspected
    began_s: float
    attempts: int = 0
    candidate: Candidate | None = None
    dispatched_s: float | None = None
    first_token_s: float | None = None
    usage: Usage = field(default_factory=Usage)


class Upstream:
    """The way to the workers. An async context: it holds the connections."""

    def __init__(self, settings: Settings, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._fleet = fleet
        self._clock = clock
        token = settings.join_token
        self._authorization = f"Bearer {token.get_secret_value()}" if token else ""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._settings.connect_timeout_s
            ),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def forward(self, trip: Trip, decision: Decision, reply: Reply) -> None:
        """Answer from the first candidate that takes the request; raise a `GatewayError`.

        The next candidate is only asked where the one before cannot have started.
        """
        # A number too large for a float reads as infinite, and JSON has no word for that.
        body = to_json(trip.inspected.body, inf_nan_mode="null")
        refusal: GatewayError = NoWorker(
            f"No worker can take requests for the model '{trip.inspected.profile.model}' now."
        )
        for candidate in decision.candidates:
            trip.attempts += 1
            trip.candidate = candidate
            try:
                with self._fleet.dispatched(candidate.worker_id, candidate.lane) as worker:
                    async with self._sent(worker, candidate.lane, body, trip) as answer:
                        return await self._relay(answer, reply, trip)
            except WorkerUnreachable as error:
                self._fleet.set_aside(candidate.worker_id)
                refusal = error
            except WorkerBusy as error:
                refusal = _sooner(refusal, error)
            log.warning(
                "attempt.refused request=%s worker=%s code=%s",
                trip.identity,
                candidate.worker_id,
                refusal.code,
            )
        raise refusal

    @contextlib.asynccontextmanager
    async def _sent(
        self, worker: WorkerReport, lane: str, body: bytes, trip: Trip
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request; leaving early closes the connection, and so frees the worker's row."""
        assert self._session is not None, "requests come inside the context"
        headers = {
            "content-type": "application/json",
            "authorization": self._authorization,
            "x-request-id": trip.identity,
            "x-paceline-lane": lane,
        }
        url = URL(worker.url + _PATHS[trip.inspected.profile.endpoint], encoded=True)
        trip.dispatched_s = self._clock()
        try:
            async with asyncio.timeout(self._settings.answer_timeout_s):
                # A redirect would carry the token to wherever a worker points.
                answer = await self._session.post(
                    url, data=_in_pieces(body), headers=headers, allow_redirects=False
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            log.warning("attempt.unreachable request=%s error=%r", trip.identity, error)
            raise WorkerUnreachable from error
        except TimeoutError as error:
            raise WorkerSilent from error
        except (aiohttp.ClientError, OSError) as error:
            log.warning("attempt.lost request=%s error=%r", trip.identity, error)
            raise WorkerLost from error
        try:
            yield answer
        finally:
            answer.close()  # a no-op where the answer was read to its end

    async def _relay(self, answer: aiohttp.ClientResponse, reply: Reply, trip: Trip) -> None:
        if answer.status != 200:
            raise await _refusal(answer, self._settings.idle_timeout_s)
        if trip.inspected.profile.stream:
            await self._relay_stream(answer, reply, trip)
        else:
            await self._relay_whole(answer, reply, trip)

    async def _relay_whole(self, answer: aiohttp.ClientResponse, reply: Reply, trip: Trip) -> None:
        try:
            async with asyncio.timeout(self._settings.idle_timeout_s):
                body = await answer.read()  # the head came, so the rest is on its way
            content = from_json(body)
        except TimeoutError as error:
            raise WorkerSilent from error
        except aiohttp.ClientError as error:
            raise WorkerLost from error
        except ValueError as error:
            raise WorkerFailed from error
        # Status 200 proves nothing: some engines send their errors with it.
        if not (isinstance(content, dict) and content.get("choices")):
            log.warning("answer.broken request=%s", trip.identity)
            raise WorkerFailed
        trip.usage = read_usage(content) or trip.usage
        await reply.whole(200, [(b"content-type", b"application/json"), *route_headers(trip)], body)

    async def _relay_stream(self, answer: aiohttp.ClientResponse, reply: Reply, trip: Trip) -> None:
        scanner = Scanner(hide_usage=not trip.inspected.profile.include_usage)
        reading = scanner.reading
        headers = [*_STREAM_HEADERS, *route_headers(trip)]
        lost: GatewayError = WorkerLost()
        try:
            await self._pass_on(answer, scanner, headers, reply, trip)
        except TimeoutError as error:
            if reply.writing:
                raise ClientLeft from error
            lost = WorkerSilent()
        except aiohttp.ClientError as error:
            log.warning("stream.cut request=%s error=%r", trip.identity, error)
        finally:
            trip.usage = reading.usage or trip.usage
        if reading.broken:
            log.warning("stream.broken request=%s why=%s", trip.identity, reading.broken)
            raise WorkerFailed
        if not reading.complete:
            raise lost
        await reply.end()

    async def _pass_on(
        self,
        answer: aiohttp.ClientResponse,
        scanner: Scanner,
        headers: Headers,
        reply: Reply,
        trip: Trip,
    ) -> None:
        """Pass events on as they come, up to the end or the first that must not be passed on."""
        loop = asyncio.get_running_loop()
        renew_at_s = 0.0
        async with asyncio.timeout(self._settings.answer_timeout_s) as pause:
            async for chunk in answer.content.iter_any():
                if loop.time() >= renew_at_s:
                    pause.reschedule(loop.time() + self._settings.idle_timeout_s)
                    renew_at_s = loop.time() + _RENEW_IDLE_S
                passed = scanner.feed(chunk)
                if trip.first_token_s is None and scanner.reading.content_seen:
                    trip.first_token_s = self._clock()
                if passed:
                    await reply.part(headers, passed)
                if scanner.reading.broken:
                    return
            if rest := scanner.close():
                await reply.part(headers, rest)


def route_headers(trip: Trip) -> Headers:
    """Say in headers where the request went and why."""
    if trip.candidate is None:
        return []
    return [
        (b"x-paceline-pool", trip.candidate.pool.encode()),
        (b"x-paceline-worker", trip.candidate.worker_id.encode()),
        (b"x-paceline-reason", trip.candidate.reason.encode()),
        (b"x-paceline-prefix", b"none"),
        (b"x-paceline-attempts", str(trip.attempts).encode()),
    ]


def _in_pieces(body: bytes) -> bytes | io.BytesIO:
    """Let a large body be sent piece by piece: in one piece it would hold up all other streams."""
    return body if len(body) < _ONE_PIECE_BYTES else io.BytesIO(body)


async def _refusal(answer: aiohttp.ClientResponse, timeout_s: float) -> GatewayError:
    """Read what a worker's refusal means for us."""
    if answer.status in _BUSY:
        return WorkerBusy(_retry_after_s(answer.headers.get("retry-after")))
    if answer.status not in _REFUSALS:
        log.warning("worker.failed status=%d", answer.status)
        return WorkerFailed()
    try:
        async with asyncio.timeout(timeout_s):
            told = from_json(await answer.content.read(_ERROR_LIMIT_BYTES))["error"]
        param, code = told.get("param"), told.get("code")
        return RefusedByWorker(
            answer.status,
            str(told["message"]),
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    except (ValueError, TypeError, KeyError, AttributeError, TimeoutError):
        return WorkerFailed()  # not in OpenAI's shape, so not meant for a client


def _retry_after_s(value: str | None) -> float:
    """Read a worker's Retry-After within reason; dates and nonsense count as the least."""
    low, high = _RETRY_AFTER_RANGE_S
    return min(max(float(value), low), high) if value is not None and value.isdecimal() else low


def _sooner(first: GatewayError, second: WorkerBusy) -> GatewayError:
    """Choose the refusal to tell: of two busy workers the one that is free sooner."""
    if isinstance(first, WorkerBusy) and (first.retry_after_s or 0) < (second.retry_after_s or 0):
        return first
    return second
