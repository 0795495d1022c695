"""Carry a request to a worker and the answer back: attempts before the first byte, none after.

Relay a worker's answer to the client, whole or event by event, and learn from it in passing.

Join a worker's stream to its client's: what comes is read in passing and written at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from pydantic_core import from_json, to_json

from gateway.config.settings import Settings
from gateway.errors import (
    GatewayError,
    NoWorker,
    Quarantined,
    RefusedByWorker,
    WorkerBusy,
    WorkerError,
    WorkerFailed,
    WorkerLost,
    WorkerSilent,
    WorkerStalled,
    WorkerUnreachable,
)
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.scheduler import Scheduler
from gateway.fleet.worker import Lease
from gateway.http.downstream import ResponseWriter
from gateway.http.upstream import (
    ConnectionLost,
    ConnectionPool,
    ReadTimeout,
    StaleConnection,
    UpstreamResponse,
    refusal,
)
from gateway.protocols.event_stream import StreamScanner, is_telling, read_drafts, read_usage
from gateway.protocols.openai import for_openai
from gateway.proxy.context import RequestContext, route_headers
from gateway.proxy.quarantine import Quarantine
from gateway.proxy.retry_budget import RetryBudget
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.types import UNUSED, Headers
from policies.request.profile import Endpoint

# What may follow the last event is the end of the stream; who does not end it is not waited for.
_AFTER_DONE_S = 1.0


class Splice:
    """One stream on its way. No task runs for an event: the connections hand it to each other."""

    def __init__(
        self,
        answer: UpstreamResponse,
        reply: ResponseWriter,
        trip: RequestContext,
        scanner: StreamScanner,
        *,
        idle_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._answer = answer
        self._reply = reply
        self._trip = trip
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._begun = False
        self._scanner = scanner
        self._send: Callable[[bytes], None] | None = None
        self.reading = scanner.reading

    async def run(self, headers: Headers) -> bytes:
        """Pass events on up to the end, or to the first that must not be passed on.

        Return what may be passed on with the end; raise `ConnectionLost`.
        """
        await self._reply.open(headers, self._answer.press)
        last = await self._answer.pour(self._pass_on, self._pass_through)
        return self._read(last) + self._scanner.close()

    def _pass_on(self, piece: bytes) -> bool:
        """Pass on what may be of a piece; say whether more is wanted."""
        reading = self.reading
        if passed := self._read(piece):
            self._reply.part(passed)
        if reading.done:
            self._answer.limit_silence(_AFTER_DONE_S)
        elif not self._begun:
            self._begun = True
            self._answer.limit_silence(self._idle_timeout_s)
        self._send = self._reply.sends_chunks() if self._scanner.quiet else None
        return not reading.broken

    def _pass_through(self, chunk: bytes) -> bool:
        """Pass on an HTTP chunk as it came, if there is nothing in it to be learnt or hidden.

        Nearly every word of a stream takes this way, and nothing on it changes what is looked at.
        """
        if self._send is None or not chunk.endswith(b"\n\n\r\n") or is_telling(chunk):
            return False
        self._send(chunk)
        return True

    def _read(self, piece: bytes) -> bytes:
        passed = self._scanner.feed(piece)
        if self._trip.first_token_s is None and self.reading.content_seen:
            self._trip.first_token_s = self._clock()
        return passed


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

    async def whole(
        self, answer: UpstreamResponse, reply: ResponseWriter, trip: RequestContext
    ) -> None:
        """Relay an answer that comes as one JSON object; raise a `WorkerError`."""
        answer.limit_silence(self._settings.idle_timeout_s)  # the rest is on its way
        try:
            body = await answer.read(_WHOLE_LIMIT_BYTES)
            content = from_json(body) if len(body) < _WHOLE_LIMIT_BYTES else None
        except ReadTimeout as error:
            raise WorkerStalled from error
        except ConnectionLost as error:
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

    async def stream(
        self, answer: UpstreamResponse, reply: ResponseWriter, trip: RequestContext
    ) -> None:
        """Relay events as they come; raise a `WorkerError` unless the last one was the last."""
        idle_timeout_s = self._settings.idle_timeout_s
        profile = trip.inspected.profile
        scanner = StreamScanner(
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
        except ReadTimeout:
            lost = WorkerStalled() if reply.started else WorkerSilent()
        except ConnectionLost as error:
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


def _tells_metrics(trip: RequestContext, *, usage: bool) -> bool:
    """Say whether an answer may tell what drafting did for it."""
    return trip.case.policy.metrics.included_in(asked=trip.inspected.profile.metrics, usage=usage)


# With these the worker has not even begun with a request.
_NEVER_BEGUN = (WorkerUnreachable, WorkerBusy)
_PATHS = {Endpoint.CHAT: "/v1/chat/completions", Endpoint.COMPLETIONS: "/v1/completions"}


class Forwarder:
    """The way to the workers. An async context: it holds the connections."""

    def __init__(
        self,
        settings: Settings,
        keys: Mapping[str, str],
        dispatch: Scheduler,
        prefixes: PrefixIndex,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._dispatch = dispatch
        self._prefixes = prefixes
        self._clock = clock
        self._connections = ConnectionPool(settings.connect_timeout_s, settings.answer_timeout_s)
        self._answers = Answers(settings, clock)
        self.retries = RetryBudget()
        self.quarantine = Quarantine()
        token = settings.join_token
        self._authorization = f"Bearer {token.get_secret_value()}" if token else ""

    async def __aenter__(self) -> Self:
        await self._connections.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._connections.__aexit__(kind, error, trace)

    async def forward(self, trip: RequestContext, reply: ResponseWriter) -> None:
        """Answer from the first worker that takes the request; raise a `GatewayError`."""
        # A number too large for a float reads as infinite, and JSON has no word for that.
        body = to_json(trip.inspected.body, inf_nan_mode="null")
        if self.quarantine.holds(body, self._clock()):
            raise Quarantined
        self.retries.active += 1
        try:
            await self._try_workers(trip, body, reply)
        finally:
            self.retries.active -= 1

    async def _try_workers(self, trip: RequestContext, body: bytes, reply: ResponseWriter) -> None:
        """Ask one worker after another, each at most once, where none before can have started."""
        tried: frozenset[str] = frozenset()
        failure: GatewayError | None = None
        while True:
            try:
                lease = await self._lease(trip, tried)
            except (NoWorker, WorkerBusy) as none_left:
                # A busy worker says when to retry, and the scheduler has the earliest such time.
                raise none_left if isinstance(failure, WorkerBusy | None) else failure from None
            result, retry_after_s = AttemptResult.ABANDONED, 0.0
            try:
                await self._attempt(lease, body, reply, trip)
                result = AttemptResult.SUCCEEDED
                self.quarantine.answered(body)
                return
            except GatewayError as error:
                result, retry_after_s = attempt_result(error), error.retry_after_s or 0.0
                trip.begun &= not isinstance(error, _NEVER_BEGUN)
                if isinstance(error, WorkerLost) and not reply.started:
                    self.quarantine.lost(body, "/".join(lease.boot), self._clock())
                tried |= {lease.candidate.worker_id}
                if not self._tries_again(error, lease, trip):
                    raise
                failure = error
            finally:
                self._dispatch.release(lease, result, retry_after_s)
                self._learn(trip, lease)

    async def _lease(self, trip: RequestContext, tried: frozenset[str]) -> Lease:
        """Take a slot, and note where and after how long."""
        lease = await self._dispatch.acquire(
            trip.case, trip.caller, tried, on_decision=trip.record_decision
        )
        trip.candidate = lease.candidate
        if trip.case.prefix_key:
            self._prefixes.record_dispatch(
                trip.case.prefix_key, lease.boot, trip.case.policy.prefix
            )
        if trip.dispatched_s is None:
            trip.waited_s = lease.waited_s
        return lease

    def _learn(self, trip: RequestContext, lease: Lease) -> None:
        """Learn from the end of an attempt whether the worker holds the system prompt."""
        if trip.case.prefix_key:
            counted = None if trip.usage is UNUSED else trip.usage
            expected = lease.candidate.prefix_cached
            self._prefixes.record_usage(
                trip.case.prefix_key, lease.boot, counted, expected=expected
            )

    def _tries_again(self, error: GatewayError, lease: Lease, trip: RequestContext) -> bool:
        """Say whether another worker may be asked: never where this one can have started.

        A request that tested a worker on probation is owed another; those are few by themselves.
        """
        again = isinstance(error, _NEVER_BEGUN) and (
            lease.on_probation or self.retries.allows(trip.case.policy.retries)
        )
        log.warning(
            "attempt.failed request=%s worker=%s code=%s again=%s",
            trip.identity,
            lease.report.worker_id,
            error.code,
            again,
        )
        return again

    async def _attempt(
        self, lease: Lease, body: bytes, reply: ResponseWriter, trip: RequestContext
    ) -> None:
        """Ask one worker and relay its answer."""
        if lease.state.listed is not None:
            body = to_json(for_openai(trip.inspected.body), inf_nan_mode="null")
        try:
            answer = await self._send(lease, body, trip)
        except StaleConnection:
            if not self.retries.allows(trip.case.policy.retries):
                raise
            try:
                answer = await self._send(lease, body, trip, fresh=True)
            except WorkerUnreachable as gone:
                # Perhaps it was not a stale connection, but a worker that died of this request.
                raise WorkerLost from gone
        try:
            if answer.status != 200:
                raise await refusal(answer, self._settings.idle_timeout_s)
            if trip.inspected.profile.stream:
                await self._answers.stream(answer, reply, trip)
            else:
                await self._answers.whole(answer, reply, trip)
        finally:
            answer.close()  # a no-op where the answer was read to its end

    async def _send(
        self, lease: Lease, body: bytes, trip: RequestContext, *, fresh: bool = False
    ) -> UpstreamResponse:
        """Send the request; further attempts count against the budget until the answer begins."""
        headers = self._headers(lease, trip)
        url = lease.report.url + _PATHS[trip.inspected.profile.endpoint]
        trip.attempts += 1
        trip.dispatched_s = trip.dispatched_s or self._clock()
        if trip.attempts == 1:
            return await self._connections.send(url, body, headers, trip.begin)
        with self.retries.retry():
            return await self._connections.send(url, body, headers, trip.begin, fresh=fresh)

    def _headers(self, lease: Lease, trip: RequestContext) -> dict[str, str]:
        """Say who asks and for which lane; the join token is for workers that joined alone."""
        headers = {"content-type": "application/json", "x-request-id": trip.identity}
        if lease.state.listed is None:
            headers["authorization"] = self._authorization
            headers["x-paceline-lane"] = lease.candidate.lane
            if trip.case.prefix_key:
                headers["x-paceline-prefix-key"] = trip.case.prefix_key
        elif key := self._keys.get(lease.report.worker_id):
            headers["authorization"] = f"Bearer {key}"
        if trip.trace is not None:
            headers |= trip.trace.attempt(trip.inspected.profile, lease.candidate)
        return headers


def attempt_result(error: GatewayError) -> AttemptResult:
    """Say what the end of an attempt says of the worker."""
    match error:
        case RefusedByWorker():
            return AttemptResult.SUCCEEDED
        case WorkerUnreachable():
            return AttemptResult.UNREACHABLE
        case WorkerBusy():
            return AttemptResult.BUSY
        case WorkerSilent():
            return AttemptResult.TIMED_OUT
        case WorkerError():
            return AttemptResult.FAILED
        case _:
            return AttemptResult.ABANDONED
