"""Forward a request to a worker and relay the response: attempts before its first byte, none after.

A stream is relayed without a task of its own: the worker's connection passes each piece to the
client's in the same iteration of the event loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pydantic_core import from_json, to_json

from gateway import errors
from gateway.assembly import Gateway
from gateway.engines import Engine
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.worker import Lease
from gateway.http import upstream
from gateway.http.downstream import AnswerWriter
from gateway.protocols import WORKER_PATHS
from gateway.protocols.base import AnswerMalformed
from gateway.protocols.event_stream import StreamScanner, comment_of
from gateway.proxy.context import RequestContext
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.quarantine import Quarantine
from gateway.proxy.retry_budget import RetryBudget
from gateway.types import UNUSED

log = logging.getLogger(__name__)

# What the error of an attempt means for the worker's circuit breaker; the first match counts.
_ATTEMPT_RESULTS = (
    (errors.RefusedByWorker, AttemptResult.SUCCEEDED),
    (errors.WorkerUnreachable, AttemptResult.UNREACHABLE),
    (errors.WorkerBusy, AttemptResult.BUSY),
    (errors.WorkerSilent, AttemptResult.TIMED_OUT),
    (errors.WorkerError, AttemptResult.FAILED),
    (errors.GatewayError, AttemptResult.ABANDONED),
)
# After these errors the worker has not begun the request.
_NEVER_BEGUN = (errors.WorkerUnreachable, errors.WorkerBusy)
# Far more than any answer has; a worker that never ends one must not fill the memory.
_WHOLE_LIMIT_BYTES = 64 * 1024 * 1024
# The end of the stream follows the last event; a worker that does not end it is not waited for.
_AFTER_DONE_S = 1.0
# The status for an error in a stream whose own status was 200.
_REFUSED = 400
_JSON_HEADERS = ((b"content-type", b"application/json"),)
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front must not collect events
)
_KEEPALIVE = b": keepalive\n\n"


class Forwarder:
    """Forwards requests to workers within the settings' limits on time."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings = settings = gateway.settings
        self._scheduler = gateway.scheduler
        self._fleet = gateway.fleet
        self._prefix_index = gateway.prefix_index
        self._prefix_hasher = gateway.prefix_hasher
        self._clock = gateway.clock
        self.connections = upstream.ConnectionPool(
            settings.connect_timeout_s, settings.answer_timeout_s
        )
        self.retries = RetryBudget()
        self.quarantine = Quarantine()

    async def forward(self, context: RequestContext, writer: AnswerWriter) -> None:
        """Relay the response of the first worker that takes the request; raise a `GatewayError`."""
        assert context.inspected is not None, "the request has not been inspected"
        # A number too large for a float reads as infinite, and JSON has no literal for that.
        body = to_json(context.inspected.body, inf_nan_mode="null")
        if self.quarantine.holds(body, self._clock()):
            raise errors.Quarantined
        self.retries.active += 1
        try:
            with self._keep_alive(context, writer):
                await self._try_workers(context, body, writer)
        finally:
            self.retries.active -= 1

    def _keep_alive(
        self, context: RequestContext, writer: AnswerWriter
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context that keeps a stream alive, and no other response."""
        if not context.profile.stream:
            return contextlib.nullcontext()
        request = context.routing_request
        assert request is not None, "the request has not been inspected"

        def comment() -> bytes:
            place = self._scheduler.queue_place(request)
            comment = place.comment() if place is not None else _KEEPALIVE
            return context.wire_format.keep_alive(comment)

        return KeepAlive(writer, _STREAM_HEADERS, self._settings.keepalive_s, comment)

    async def _try_workers(
        self, context: RequestContext, body: bytes, writer: AnswerWriter
    ) -> None:
        """Try one worker after another, each once, as long as none can have begun the request."""
        tried: frozenset[str] = frozenset()
        failure: errors.GatewayError | None = None
        while True:
            try:
                lease = await self._acquire(context, tried)
            except (errors.NoWorker, errors.WorkerBusy) as none_left:
                # A busy worker says when to retry, and the scheduler has the earliest such time.
                raise (
                    none_left if isinstance(failure, errors.WorkerBusy | None) else failure
                ) from None
            result, retry_after_s = AttemptResult.ABANDONED, 0.0
            try:
                await self._attempt(lease, body, writer, context)
                result = AttemptResult.SUCCEEDED
                self.quarantine.answered(body)
                return
            except errors.GatewayError as error:
                result = next(one for kind, one in _ATTEMPT_RESULTS if isinstance(error, kind))
                retry_after_s = error.retry_after_s or 0.0
                context.begun &= not isinstance(error, _NEVER_BEGUN)
                if isinstance(error, errors.WorkerLost) and not context.relayed:
                    self.quarantine.lost(body, "/".join(lease.boot), self._clock())
                tried |= {lease.candidate.worker_id}
                if not self._retries(error, lease, context):
                    raise
                failure = error
            finally:
                self._scheduler.release(lease, result, retry_after_s)
                self._record_prefix_usage(context, lease)

    async def _acquire(self, context: RequestContext, tried: frozenset[str]) -> Lease:
        """Acquire a slot, and record where and after how long."""
        request = context.routing_request
        assert request is not None, "the request has not been inspected"
        lease = await self._scheduler.acquire(
            request,
            context.caller,
            tried,
            on_decision=context.record_decision,
            since_s=context.body_read_s,
        )
        context.candidate = lease.candidate
        backend = lease.state.backend
        context.engine = "" if backend.sends_reports else backend.kind
        if request.prefix.ends:
            context.expected_reuse = self._prefix_index.record_dispatch(
                request.prefix, lease.boot, context.policy.prefix
            )
            context.prefix_sources = self._fleet.node_sources(
                lease.state, context.expected_reuse.holders
            )
        if context.dispatched_at_s is None:
            context.waited_s = lease.waited_s
        return lease

    def _record_prefix_usage(self, context: RequestContext, lease: Lease) -> None:
        """Record after an attempt whether the worker had the earlier turns in its cache."""
        prefix = context.prefix_keys
        if prefix.ends:
            usage = None if context.usage is UNUSED else context.usage
            context.missed_reuse = self._prefix_index.record_usage(
                prefix, lease.boot, usage, context.expected_reuse
            )

    def _retries(self, error: errors.GatewayError, lease: Lease, context: RequestContext) -> bool:
        """Return whether to try another worker: never if this one can have begun the request.

        A request that probed a worker may always be retried; such requests are few.
        """
        again = isinstance(error, _NEVER_BEGUN) and (
            lease.on_probation or self.retries.allows(context.policy.retries)
        )
        log.warning(
            "attempt.failed request=%s worker=%s code=%s again=%s",
            context.request_id,
            lease.candidate.worker_id,
            error.code,
            again,
        )
        return again

    async def _attempt(
        self, lease: Lease, body: bytes, writer: AnswerWriter, context: RequestContext
    ) -> None:
        """Send the request to one worker and relay its response."""
        assert context.inspected is not None
        backend, fields = lease.state.backend, context.inspected.body
        salt = ""
        if not backend.sends_reports:
            salt = self._prefix_hasher.cache_salt(context.caller, context.policy.prefix)
        body = backend.body(body, fields, salt)
        try:
            response = await self._send(lease, body, context)
        except upstream.StaleConnection:
            if not self.retries.allows(context.policy.retries):
                raise
            try:
                response = await self._send(lease, body, context, fresh=True)
            except errors.WorkerUnreachable as error:
                # Perhaps the connection was not stale, but the worker died of this request.
                raise errors.WorkerLost from error
        try:
            if response.status != 200:
                idle_timeout_s = self._settings.idle_timeout_s
                raise await upstream.refusal(response, idle_timeout_s, backend.refusal, fields)
            if context.profile.stream:
                await self._relay_stream(response, writer, context, backend)
            else:
                await self._relay_whole(response, writer, context, backend)
        finally:
            response.release()

    async def _send(
        self, lease: Lease, body: bytes, context: RequestContext, *, fresh: bool = False
    ) -> upstream.UpstreamConnection:
        """Send the request; until the response begins, a retry counts against the budget."""
        context.attempts += 1
        context.dispatched_at_s = context.dispatched_at_s or self._clock()
        if context.attempts == 1:
            return await self._post(lease, body, context)
        with self.retries.retry():
            return await self._post(lease, body, context, fresh=fresh)

    async def _post(
        self, lease: Lease, body: bytes, context: RequestContext, *, fresh: bool = False
    ) -> upstream.UpstreamConnection:
        """Send the request, and once more if the worker tells that it may need more tokens."""
        backend, candidate, reservation = lease.state.backend, lease.candidate, context.reservation
        headers = {"content-type": "application/json", "x-request-id": context.request_id}
        if context.trace is not None:
            headers |= context.trace.attempt(context.profile, candidate)
        url = lease.state.report.url + WORKER_PATHS[context.profile.endpoint]
        send = self.connections.send
        scope = self._prefix_hasher.cache_salt(context.caller, context.policy.prefix) or "all"
        lane, keys = candidate.lane, context.prefix_keys
        sources = context.prefix_sources
        headers |= backend.headers(lane, keys, scope, context.token_limit, sources=sources)
        response = await send(url, body, headers, context.begin, fresh=fresh)
        refused = response.status != 200 and response.tokens
        if reservation is None or context.token_limit is None or not refused:
            return response
        tokens = response.tokens
        response.release()
        reservation.resize(tokens)
        headers |= backend.headers(lane, keys, scope, context.token_limit, sources=sources)
        return await send(url, body, headers, context.begin)

    async def _relay_whole(
        self,
        response: upstream.UpstreamConnection,
        writer: AnswerWriter,
        context: RequestContext,
        backend: Engine,
    ) -> None:
        """Relay a response that is one JSON object; raise a `WorkerError`."""
        response.set_read_timeout(self._settings.idle_timeout_s)  # the rest is on its way
        try:
            body = await response.read(_WHOLE_LIMIT_BYTES)
            whole = len(body) < _WHOLE_LIMIT_BYTES
            answer = from_json(body, allow_inf_nan=False) if whole else None
        except upstream.ReadTimeout as error:
            raise errors.WorkerStalled from error
        except upstream.ConnectionLost as error:
            raise errors.WorkerLost from error
        except ValueError as error:
            raise errors.WorkerFailed from error
        # Status 200 proves nothing: some engines send their errors with it.
        if not (isinstance(answer, dict) and context.wire_format.is_complete(answer)):
            log.warning("answer.broken request=%s", context.request_id)
            raise errors.WorkerFailed
        context.usage = backend.usage(answer) or context.usage
        context.drafts = backend.drafts(answer)
        if backend.normalise(answer):
            body = to_json(answer, inf_nan_mode="null")
        assert context.routing_request is not None
        try:
            encoded = context.wire_format.encode(context.routing_request, answer, body)
        except AnswerMalformed as error:
            raise errors.WorkerFailed from error
        if context.exchange is not None:
            encoded = await context.exchange.finish()
        await writer.whole(200, [*_JSON_HEADERS, *context.route_headers()], encoded)

    async def _relay_stream(
        self,
        response: upstream.UpstreamConnection,
        writer: AnswerWriter,
        context: RequestContext,
        backend: Engine,
    ) -> None:
        """Relay events as they come; raise a `WorkerError` unless the stream is complete."""
        assert context.routing_request is not None
        assert context.inspected is not None
        route_headers = context.route_headers()
        late_headers = route_headers if writer.started else ()
        encoder = context.wire_format.encoder(context.routing_request, late_headers)
        scanner = StreamScanner(encoder, backend)
        state, last = scanner.state, b""
        idle_timeout_s = self._settings.idle_timeout_s
        relay = StreamRelay(response, writer, context, scanner, idle_timeout_s, self._clock)
        failure: errors.GatewayError = errors.WorkerLost()
        response.set_read_timeout(self._settings.answer_timeout_s)
        try:
            await writer.open([*_STREAM_HEADERS, *route_headers], relay.pause)
            if late_headers:
                writer.write(comment_of(late_headers))
            end = await response.pour(relay.relay_data, relay.relay_chunk)
            last = relay.scan(end) + scanner.close()
        except upstream.ReadTimeout:
            failure = errors.WorkerStalled() if state.begun else errors.WorkerSilent()
        except upstream.ConnectionLost as error:
            log.warning("stream.cut request=%s error=%r", context.request_id, error)
        finally:
            context.usage = state.usage or context.usage
            context.drafts = state.drafts
            context.relayed = state.begun
        if state.complete:
            if context.exchange is not None:
                last += await context.exchange.finish()
            writer.end(last)
            return
        if last:
            writer.write(last)
        if state.broken:
            log.warning("stream.broken request=%s why=%s", context.request_id, state.broken)
            if state.error and not state.begun and context.engine:
                # Some engines begin each stream with 200, and then refuse the request.
                raise backend.refusal(_REFUSED, state.error, context.inspected.body)
            raise errors.WorkerFailed
        raise failure


@dataclass(slots=True, eq=False)
class StreamRelay:
    """Relays one stream of events from a worker to a client."""

    response: upstream.UpstreamConnection
    writer: AnswerWriter
    context: RequestContext
    scanner: StreamScanner
    idle_timeout_s: float
    clock: Callable[[], float]
    begun: bool = False
    send_chunk: Callable[[bytes], None] | None = None

    def relay_data(self, piece: bytes) -> bool:
        """Relay a piece; return whether more is wanted."""
        state = self.scanner.state
        if encoded := self.scan(piece):
            self.writer.write(encoded)
        if state.done:
            self.response.set_read_timeout(_AFTER_DONE_S)
        elif not self.begun:
            self.begun = True
            self.response.set_read_timeout(self.idle_timeout_s)
        self.send_chunk = self.writer.chunk_sender() if self.scanner.quiet else None
        return not state.broken

    def relay_chunk(self, chunk: bytes) -> bool:
        """Relay an HTTP chunk as it came, if it carries text alone; return whether it was relayed.

        Nearly every token takes this path, which changes no state.
        """
        if (
            self.send_chunk is None
            or not chunk.endswith(b"\n\n\r\n")
            or self.scanner.has_facts(chunk)
        ):
            return False
        self.writer.idle = False
        self.send_chunk(chunk)
        return True

    def pause(self, paused: bool) -> None:
        """Pause or resume reading the response, for a client that reads slowly."""
        self.context.read_slowly = True
        self.response.pause(paused)

    def scan(self, piece: bytes) -> bytes:
        """Scan a piece, and return what the client gets of it."""
        encoded = self.scanner.feed(piece)
        if self.context.first_token_at_s is None and self.scanner.state.content_seen:
            self.context.first_token_at_s = self.clock()
        return encoded
