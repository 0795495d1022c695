"""Relay a worker's answer to the client, whole or event by event, and learn from it in passing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic_core import from_json

from gateway.client import Headers, Reply
from gateway.errors import GatewayError, WorkerFailed, WorkerLost, WorkerSilent, WorkerStalled
from gateway.settings import Settings
from gateway.sse import Scanner, read_usage
from gateway.trip import Trip, route_headers
from gateway.worker_link import Answer, LinkLost, LinkSilent

log = logging.getLogger(__name__)

# What may follow the last event is the end of the stream; who does not end it is not waited for.
_AFTER_DONE_S = 1.0
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front must not collect events
)


class Answers:
    """Relays answers of workers within the settings' limits on time."""

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock

    async def whole(self, answer: Answer, reply: Reply, trip: Trip) -> None:
        """Relay an answer that comes as one JSON object; raise a `WorkerError`."""
        answer.limit_silence(
            self._settings.idle_timeout_s
        )  # the head came, so the rest is on its way
        try:
            body = await answer.read()
            content = from_json(body)
        except LinkSilent as error:
            raise WorkerStalled from error
        except LinkLost as error:
            raise WorkerLost from error
        except ValueError as error:
            raise WorkerFailed from error
        # Status 200 proves nothing: some engines send their errors with it.
        if not (isinstance(content, dict) and content.get("choices")):
            log.warning("answer.broken request=%s", trip.identity)
            raise WorkerFailed
        trip.usage = read_usage(content) or trip.usage
        await reply.whole(200, [(b"content-type", b"application/json"), *route_headers(trip)], body)

    async def stream(self, answer: Answer, reply: Reply, trip: Trip) -> None:
        """Relay events as they come; raise a `WorkerError` unless the last one was the last."""
        scanner = Scanner(hide_usage=not trip.inspected.profile.include_usage)
        reading = scanner.reading
        headers = [*_STREAM_HEADERS, *route_headers(trip)]
        lost: GatewayError = WorkerLost()
        try:
            await self._pass_on(answer, scanner, headers, reply, trip)
        except LinkSilent:
            lost = WorkerStalled() if reply.started else WorkerSilent()
        except LinkLost as error:
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
        answer: Answer,
        scanner: Scanner,
        headers: Headers,
        reply: Reply,
        trip: Trip,
    ) -> None:
        """Pass events on as they come, up to the end or the first that must not be passed on."""
        answer.limit_silence(self._settings.answer_timeout_s)
        begun = False
        while chunk := await answer.chunk():
            if not begun:
                answer.limit_silence(self._settings.idle_timeout_s)
                begun = True
            passed = scanner.feed(chunk)
            if trip.first_token_s is None and scanner.reading.content_seen:
                trip.first_token_s = self._clock()
            if passed:
                await reply.part(headers, passed)
            if scanner.reading.broken:
                return
            if scanner.reading.done:
                answer.limit_silence(_AFTER_DONE_S)
        if rest := scanner.close():
            await reply.part(headers, rest)
