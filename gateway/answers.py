"""Relay a worker's answer to the client, whole or event by event, and learn from it in passing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pydantic_core import from_json, to_json

from gateway.config.settings import Settings
from gateway.errors import GatewayError, WorkerFailed, WorkerLost, WorkerSilent, WorkerStalled
from gateway.http.downstream import Reply
from gateway.http.upstream import Answer, LinkLost, LinkSilent
from gateway.protocols.event_stream import Scanner, read_drafts, read_usage
from gateway.proxy.context import Trip, route_headers
from gateway.splice import Splice

log = logging.getLogger(__name__)

# Far more than any answer has; a worker that never ends one must not fill the memory.
_WHOLE_LIMIT_BYTES = 64 * 1024 * 1024
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
        answer.limit_silence(self._settings.idle_timeout_s)  # the rest is on its way
        try:
            body = await answer.read(_WHOLE_LIMIT_BYTES)
            content = from_json(body) if len(body) < _WHOLE_LIMIT_BYTES else None
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
        trip.drafts = read_drafts(content)
        if "metrics" in content and not _tells_metrics(trip, usage=True):
            del content["metrics"]
            body = to_json(content)
        await reply.whole(200, [(b"content-type", b"application/json"), *route_headers(trip)], body)

    async def stream(self, answer: Answer, reply: Reply, trip: Trip) -> None:
        """Relay events as they come; raise a `WorkerError` unless the last one was the last."""
        idle_timeout_s = self._settings.idle_timeout_s
        profile = trip.inspected.profile
        scanner = Scanner(
            hide_usage=not profile.include_usage,
            hide_metrics=not _tells_metrics(trip, usage=profile.include_usage),
        )
        splice = Splice(
            answer, reply, trip, scanner, idle_timeout_s=idle_timeout_s, clock=self._clock
        )
        reading = splice.reading
        last = b""
        lost: GatewayError = WorkerLost()
        answer.limit_silence(self._settings.answer_timeout_s)
        try:
            last = await splice.run([*_STREAM_HEADERS, *route_headers(trip)])
        except LinkSilent:
            lost = WorkerStalled() if reply.started else WorkerSilent()
        except LinkLost as error:
            log.warning("stream.cut request=%s error=%r", trip.identity, error)
        finally:
            trip.usage = reading.usage or trip.usage
            trip.drafts = reading.drafts
        if reading.complete:
            reply.end(last)
            return
        if last:
            reply.part(last)
        if reading.broken:
            log.warning("stream.broken request=%s why=%s", trip.identity, reading.broken)
            raise WorkerFailed
        raise lost


def _tells_metrics(trip: Trip, *, usage: bool) -> bool:
    """Say whether an answer may tell what drafting did for it."""
    return trip.case.policy.metrics.tells(asked=trip.inspected.profile.metrics, usage=usage)
