"""Forward a request to a worker and relay the response; go on at another worker if one fails.

A stream is relayed without a task of its own: the worker's connection passes each piece to the
client's in the same iteration of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import quote

from pydantic_core import from_json, to_json

from gateway import errors
from gateway.assembly import Gateway
from gateway.engines.base import Engine, Isolation, Told
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.health import CHECK_REFUSALS
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease
from gateway.http import upstream
from gateway.protocols.base import WORKER_PATHS, AnswerMalformed
from gateway.protocols.engine_answer import CallRules, EngineAnswer, FieldUnheld
from gateway.protocols.event_stream import AnswerProgress, StreamScanner, StreamState, comment_of
from gateway.proxy.context import RequestContext
from gateway.proxy.keep_alive import KeepAlive
from gateway.proxy.quarantine import Quarantine
from gateway.proxy.retry_budget import RetryBudget, RetryTurn
from gateway.responses.exchange import AnswerWriter
from gateway.strict_json import Pieces, footprint_bytes, size_of, with_fields
from gateway.types import UNUSED, Headers
from paceline.protocol import ANSWER_FIELD, KEEPALIVE_S, MODEL_HEADER, PROGRESS_HEADER, TOKENS_LINE
from paceline.request.fields import CACHE_SALT
from paceline.request.profile import GENERATING

log = logging.getLogger(__name__)

# What the error of an attempt means for the worker's circuit breaker; the first match counts.
_ATTEMPT_RESULTS = (
    (errors.RefusedByWorker, AttemptResult.SUCCEEDED),
    (errors.FieldUnheld, AttemptResult.SUCCEEDED),
    (errors.WorkerUnreachable, AttemptResult.UNREACHABLE),
    (errors.WorkerMoved, AttemptResult.ABANDONED),
    (errors.WorkerBusy, AttemptResult.BUSY),
    (errors.WorkerSilent, AttemptResult.TIMED_OUT),
    (errors.WorkerError, AttemptResult.FAILED),
    (errors.GatewayError, AttemptResult.ABANDONED),
)
# Of one body, each worker's circuit breaker counts one: more may be the fault of the body.
_FAILURES = (AttemptResult.FAILED, AttemptResult.TIMED_OUT)
# After these errors no further worker gets the request; the client gets the first cause.
_ENDS_RETRIES = (
    errors.NoWorker,
    errors.FeatureUntaken,
    errors.WorkerBusy,
    errors.RefusedByWorker,
)
# After these errors the worker has not begun the request.
_NEVER_BEGUN = (errors.WorkerUnreachable, errors.WorkerBusy)
# A body stays in memory until its answer is complete, so a larger one goes to no second worker.
_FAILOVER_LIMIT_BYTES = 8 * 1024 * 1024
# Three missed comments, with which a worker of Paceline ends each pause of a stream.
_STALLED_S = 3 * KEEPALIVE_S + 1
# Of the lines of one stream; each token takes some 9 bytes.
_LINES_LIMIT_BYTES = 4 * 1024 * 1024
_SEED_BITS = 53
# So long after the estimated time for its prompt, a retry lets the next one begin.
_READ_MARGIN_S = 1.0
# Far more than any answer has; a worker that never ends one must not fill the memory.
_WHOLE_LIMIT_BYTES = 64 * 1024 * 1024
# The end of the stream follows the last event; a worker that does not end it is not waited for.
_AFTER_DONE_S = 1.0
# Queued requests that workers check at a time.
_MAX_CHECKS = 8
# The status of an error in a stream, as an engine would have it, and that of the stream.
_REFUSED, _STREAMED = 400, 200
_JSON_HEADERS = ((b"content-type", b"application/json"),)
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front must not collect events
)
_KEEPALIVE = b": keepalive\n\n"
_LINE_BEGIN = b"\r\n" + TOKENS_LINE
_LINE_BEGINS_BEFORE = 12
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(4096)]


class Forwarder:
    """Forwards requests to workers within the settings' limits on time."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings = settings = gateway.settings
        self._scheduler = gateway.scheduler
        self._fleet = gateway.fleet
        self._prefix_index = gateway.prefix_index
        self._prefix_hasher = gateway.prefix_hasher
        self._clock = gateway.clock
        self._control = gateway.control
        self._thread = gateway.inspection_thread
        self._relays: set[StreamRelay] = set()
        self._checks: set[asyncio.Task[None]] = set()
        self._check_slots = asyncio.Semaphore(_MAX_CHECKS)
        self.connections = upstream.ConnectionPool(
            settings.connect_timeout_s, settings.answer_timeout_s
        )
        self.retries = RetryBudget(asyncio.Event)
        self.quarantine = Quarantine()

    async def forward(self, context: RequestContext, writer: AnswerWriter) -> None:
        """Relay the response of the first worker that takes the request; raise a `GatewayError`."""
        body = context.encoded
        if self.quarantine.holds(body, self._clock()):
            raise errors.Quarantined
        self.retries.active += 1
        try:
            with self._keep_alive(context, body, writer):
                whole = await self._try_workers(context, body, writer)
        finally:
            self.retries.active -= 1
        if whole is not None:  # a client that reads it slowly occupies no slot
            await writer.whole(200, [*_JSON_HEADERS, *context.route_headers()], whole)

    async def end_silent(self) -> None:
        """End the attempts at workers that send neither bytes nor heartbeats any more."""
        silent = tuple(f"{url}/" for url in self._fleet.silent_urls())
        if silent:
            self.connections.end_silent(silent, HEARTBEAT_TIMEOUT_S)
        for relay in self._relays:
            relay.bound_progress()

    def move_streams(self, worker_id: str) -> int:
        """Let the streams of a worker that can go on elsewhere do so; return their number."""
        others = {
            worker.report.fingerprint
            for worker in self._fleet.workers()
            if worker.accepting and worker.report.worker_id != worker_id
        }
        moving = [
            relay
            for relay in self._relays
            if relay.resumable
            and relay.context.fingerprint in others
            and relay.context.candidate is not None
            and relay.context.candidate.worker_id == worker_id
        ]
        for relay in moving:
            relay.move()
        return len(moving)

    def _keep_alive(
        self, context: RequestContext, body: Pieces, writer: AnswerWriter
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context that keeps a stream alive, and no other response."""
        if not context.profile.stream:
            return contextlib.nullcontext()
        request = context.routed

        def comment() -> bytes:
            place = self._scheduler.queue_place(request)
            comment = place.comment() if place is not None else _KEEPALIVE
            return context.wire_format.keep_alive(comment)

        def check() -> None:
            task = asyncio.create_task(self._check_queued(context, body))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

        return KeepAlive(writer, _STREAM_HEADERS, self._settings.keepalive_s, comment, check)

    async def _check_queued(self, context: RequestContext, body: Pieces) -> None:
        """Let a worker check a queued request, and reject it if the worker would refuse it.

        Before an early head such a refusal still has a status of its own.
        """
        request, decision = context.routed, context.decision
        workers = {worker.report.worker_id: worker for worker in self._fleet.workers()}
        for candidate in decision.candidates if decision is not None else ():
            worker = workers.get(candidate.worker_id)
            if worker is None or not worker.backend.sends_reports:
                continue
            async with self._check_slots:
                if self._scheduler.queue_place(request) is None:
                    return
                headers = worker.backend.headers(Told(candidate.lane))
                path = WORKER_PATHS[context.profile.endpoint]
                checked = await self._control.check(worker.report, path, body, headers)
            if checked is not None and checked[0] in CHECK_REFUSALS:
                error = worker.backend.refusal(checked[0], to_json(checked[1]), {})
                if isinstance(error, errors.RefusedByWorker):
                    self._scheduler.reject(request, error)
            return

    async def _try_workers(
        self, context: RequestContext, body: Pieces, writer: AnswerWriter
    ) -> bytes | None:
        """Try one worker after another, each once, as long as the policy allows another one.

        Return a whole answer.
        """
        tried: frozenset[str] = frozenset()
        failure: errors.GatewayError | None = None
        turn: RetryTurn | None = None
        while True:
            try:
                lease = await self._acquire(context, tried)
                result, retry_after_s = AttemptResult.ABANDONED, 0.0
                try:
                    whole = await self._attempt(lease, body, writer, context, turn)
                    result = AttemptResult.SUCCEEDED
                    self.quarantine.answered(body)
                    return whole
                except errors.GatewayError as error:
                    result = next(one for kind, one in _ATTEMPT_RESULTS if isinstance(error, kind))
                    retry_after_s = error.retry_after_s or 0.0
                    boot, now_s = "/".join(lease.boot), self._clock()
                    if result in _FAILURES and not self.quarantine.failed(body, boot, now_s):
                        result = AttemptResult.ABANDONED
                    # The fleet leaves out a busy worker itself, for as long as it is busy.
                    if result is not AttemptResult.BUSY:
                        tried |= {lease.candidate.worker_id}
                    if not self._goes_on(error, lease, context, body):
                        raise
                    failure = error.with_traceback(None)  # which has this frame, and so a cycle
                finally:
                    self._scheduler.release(lease, result, retry_after_s)
                    self._record_prefix_usage(context, lease)
            except _ENDS_RETRIES as error:
                try:
                    raise _first_cause(error, failure, begun=context.relayed) from None
                finally:
                    failure = None
            finally:
                if turn is not None:
                    turn.end()
            # A request that probed a worker waits for no other; such requests are few.
            if not lease.on_probation:
                turn = await self.retries.begin(context.policy.retries)

    async def _acquire(self, context: RequestContext, tried: frozenset[str]) -> Lease:
        """Acquire a slot, and record where and after how long."""
        request = context.routed
        while True:
            lease = await self._scheduler.acquire(
                request,
                context.caller,
                tried,
                on_decision=context.record_decision,
                since_s=context.body_read_s,
                begun=context.failovers > 0,
            )
            if not context.relayed or lease.state.report.fingerprint == context.fingerprint:
                break
            self._scheduler.release(lease, AttemptResult.ABANDONED)  # it has another model
            tried |= {lease.candidate.worker_id}
        context.candidate = lease.candidate
        backend = lease.state.backend
        context.engine = "" if backend.sends_reports else backend.kind
        profile = context.profile
        held = lease.state.report.constrains_calls and not profile.structured_output
        context.unheld = () if held else profile.call_fields
        if context.checked.cache_salt and backend.isolation is Isolation.NONE:
            context.unheld += (CACHE_SALT,)
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

    def _goes_on(
        self, error: errors.GatewayError, lease: Lease, context: RequestContext, body: Pieces
    ) -> bool:
        """Return whether the request goes to another worker after this error, and count that.

        Generating has no side effects, so a request may run again. Of workers that had begun it,
        only so many may fail as the policy allows, and only one of them may have crashed before
        its answer began: that may be the fault of the prompt.
        """
        ordered = self._is_ordered(error, lease)
        if isinstance(error, errors.WorkerLost) and not ordered:
            self.quarantine.lost(body, "/".join(lease.boot), self._clock())
        again = isinstance(error, errors.WorkerError) and (
            lease.on_probation or self.retries.allows(context.policy.retries)
        )
        if isinstance(error, _NEVER_BEGUN):
            context.begun = context.failovers > 0
        else:
            context.worker_failures += not ordered
            again = again and self._can_go_on(context, body)
            context.failovers += again
        log.warning(
            "attempt.failed request=%s worker=%s code=%s ordered=%s again=%s",
            context.request_id,
            lease.candidate.worker_id,
            error.counted_as,
            ordered,
            again,
        )
        return again

    def _can_go_on(self, context: RequestContext, body: Pieces) -> bool:
        """Return whether a request may go on after a worker that had begun it has failed."""
        if size_of(body) > _FAILOVER_LIMIT_BYTES:
            return False
        if context.worker_failures > context.policy.retries.per_request:
            return False
        if context.relayed:
            return context.progress is not None and context.progress.resumable
        return not self.quarantine.holds(body, self._clock())

    def _is_ordered(self, error: errors.GatewayError, lease: Lease) -> bool:
        """Return whether the worker has failed because somebody stops it."""
        absence = self._fleet.absence(lease.candidate.worker_id)
        left = absence is not None and absence[0] == "left"
        return isinstance(error, errors.WorkerMoved) or lease.state.report.draining or left

    async def _body_for(self, lease: Lease, body: Pieces, context: RequestContext) -> Pieces:
        """Return the body for one worker."""
        backend, fields = lease.state.backend, context.checked.body
        salt = "" if backend.sends_reports else self._scope_of(context)
        body = await self._thread.run(size_of(body), backend.body, body, fields, salt)
        profile, more = context.profile, []
        if not backend.continues_streams or profile.endpoint not in GENERATING:
            return body
        if (
            profile.sampling.seed is None
            and not profile.sampling.greedy
            and lease.state.report.fingerprint  # else nobody goes on, and a seed may cost its batch
        ):
            if context.seed is None:
                context.seed = secrets.randbits(_SEED_BITS)
            more.append(b'"seed":%d' % context.seed)
        if context.relayed and context.progress is not None:
            lines = to_json(context.progress.encode())
            more.append(b'"%b":%b' % (ANSWER_FIELD.encode(), lines))
        return with_fields(body, *more) if more else body

    def _scope_of(self, context: RequestContext) -> str:
        """Return the name of the isolation scope of a request; empty if all clients share it."""
        salt = context.checked.cache_salt
        return self._prefix_hasher.cache_salt(context.caller, context.policy.prefix, salt)

    def _prepare_progress(self, lease: Lease, body: Pieces, context: RequestContext) -> None:
        """Let a worker tell the tokens of a stream, if another one could go on with it."""
        report = lease.state.report
        continues = (
            context.profile.stream
            and lease.state.backend.continues_streams
            and context.policy.retries.per_request > 0
            and not context.profile.exact  # another worker would read the answer in one pass
            and size_of(body) <= _FAILOVER_LIMIT_BYTES
            and report.fingerprint
        )
        context.fingerprint = report.fingerprint
        context.progress = AnswerProgress() if continues else None

    async def _attempt(
        self,
        lease: Lease,
        body: Pieces,
        writer: AnswerWriter,
        context: RequestContext,
        turn: RetryTurn | None,
    ) -> bytes | None:
        """Send the request to one worker; return its whole answer, or relay its stream.

        Until the worker should have read the prompt, a retry counts against the budget.
        """
        backend, fields = lease.state.backend, context.checked.body
        if not context.relayed:
            self._prepare_progress(lease, body, context)
        body = await self._body_for(lease, body, context)
        timer = None
        if turn is not None:
            read_s = lease.candidate.prefill_s + _READ_MARGIN_S
            timer = asyncio.get_running_loop().call_later(read_s, turn.end)
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
        finally:
            if timer is not None:
                timer.cancel()
        if turn is not None:
            turn.end()
        try:
            if response.status != 200:
                idle_timeout_s = self._settings.idle_timeout_s
                raise await upstream.refusal(response, idle_timeout_s, backend.refusal, fields)
            self._scheduler.record_taken(lease)
            if context.profile.stream:
                await self._relay_stream(response, writer, context, backend)
                return None
            return await self._read_whole(response, context, backend)
        finally:
            response.release()

    async def _send(
        self, lease: Lease, body: Pieces, context: RequestContext, *, fresh: bool = False
    ) -> upstream.UpstreamConnection:
        """Send the request, and once more if the worker tells that it may need more tokens."""
        context.attempts += 1
        context.dispatched_at_s = context.dispatched_at_s or self._clock()
        backend, candidate, reservation = lease.state.backend, lease.candidate, context.reservation
        headers = {"content-type": "application/json", "x-request-id": context.request_id}
        if context.trace is not None:
            headers |= context.trace.attempt(context.profile, candidate)
        asked_model = context.checked.asked_model
        url = lease.state.report.url + WORKER_PATHS[context.profile.endpoint]
        send = self.connections.send
        scope = self._scope_of(context) or "all"
        told = Told(candidate.lane, context.prefix_keys, scope, sources=context.prefix_sources)
        if context.progress is not None:
            headers[PROGRESS_HEADER] = "1"
        if backend.sends_reports and asked_model != context.profile.model:
            headers[MODEL_HEADER] = quote(asked_model)
        headers |= backend.headers(told._replace(token_limit=context.token_limit))
        response = await send(url, body, headers, context.begin, fresh=fresh)
        refused = response.status != 200 and response.tokens
        if reservation is None or context.token_limit is None or not refused:
            return response
        tokens = response.tokens
        response.release()
        reservation.resize(tokens)
        headers |= backend.headers(told._replace(token_limit=context.token_limit))
        return await send(url, body, headers, context.begin)

    async def _read_whole(
        self, response: upstream.UpstreamConnection, context: RequestContext, backend: Engine
    ) -> bytes:
        """Return the client's form of a response that is one JSON object; raise a `WorkerError`."""
        response.set_read_timeout(self._settings.idle_timeout_s)  # the rest is on its way
        try:
            body = await response.read(_WHOLE_LIMIT_BYTES, context.hold.add)
            if len(body) >= _WHOLE_LIMIT_BYTES:
                raise errors.AnswerTooLarge
            context.hold.add(footprint_bytes(body))
            answer = from_json(body, allow_inf_nan=False)
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
        form = self._answer_form(context, backend)
        renamed = "model" in answer and answer["model"] != context.checked.asked_model
        try:
            if form is not None:
                form.read_whole(answer)
            if renamed:
                answer["model"] = context.checked.asked_model
            if form is not None or renamed:
                body = to_json(answer, inf_nan_mode="null")
            encoded = context.wire_format.encode(context.routed, answer, body)
        except FieldUnheld as error:
            raise errors.FieldUnheld(str(error)) from error
        except AnswerMalformed as error:
            raise errors.WorkerFailed from error
        if context.exchange is not None:
            encoded = await context.exchange.finish()
        return encoded

    @staticmethod
    def _answer_form(context: RequestContext, backend: Engine) -> EngineAnswer | None:
        """Return what gives an answer its form; None for workers of ours, which need none."""
        if backend.sends_reports:
            return None
        inspected = context.checked
        rules = CallRules.of(inspected.body)
        if context.profile.legacy_functions:  # their clients get the first call
            rules = rules._replace(single=False)
        return EngineAnswer(secrets.token_hex(8), inspected.asked_model, rules)

    def _scanner(
        self, context: RequestContext, backend: Engine, late_headers: Headers
    ) -> StreamScanner:
        """Return the scanner of an attempt, which goes on where the client has the stream."""
        if not context.relayed or context.encoder is None:
            context.encoder = context.wire_format.encoder(context.routed, late_headers)
        context.encoder.failovers = context.failovers
        scanner = StreamScanner(
            context.encoder,
            context.wire_format.keep_alive,
            backend,
            answer=self._answer_form(context, backend),
            progress=context.progress,
        )
        if context.relayed and context.progress is not None:
            scanner.state.finished = context.progress.finished
        return scanner

    async def _relay_stream(
        self,
        response: upstream.UpstreamConnection,
        writer: AnswerWriter,
        context: RequestContext,
        backend: Engine,
    ) -> None:
        """Relay events as they come; raise a `WorkerError` unless the stream is complete."""
        route_headers = context.route_headers()
        late_headers = route_headers if writer.started else []
        scanner = self._scanner(context, backend, late_headers)
        encoder, progress, state = scanner.encoder, scanner.progress, scanner.state
        last = b""
        idle_timeout_s, answer_timeout_s = (
            min(one, _STALLED_S) if backend.continues_streams else one
            for one in (self._settings.idle_timeout_s, self._settings.answer_timeout_s)
        )
        assert context.inspected is not None
        collects = not encoder.passthrough or bool(context.inspected.body.get("tools"))
        relay = StreamRelay(
            response, writer, context, scanner, idle_timeout_s, self._clock, collects
        )
        failure: errors.GatewayError = errors.WorkerLost()
        response.set_read_timeout(answer_timeout_s)
        self._relays.add(relay)
        try:
            await writer.open([*_STREAM_HEADERS, *route_headers], relay.pause)
            if late_headers:
                writer.write(comment_of(late_headers))
            end = await response.pour(relay.relay_data, relay.relay_chunk)
            last = relay.scan(end) + scanner.close()
        except upstream.ReadTimeout:
            begun = state.begun or context.relayed
            failure = errors.WorkerStalled() if begun else errors.WorkerSilent()
        except upstream.ConnectionLost as error:
            log.warning("stream.cut request=%s error=%r", context.request_id, error)
            if relay.moved:
                failure = errors.WorkerMoved()
        finally:
            self._relays.discard(relay)
            context.usage = state.usage or context.usage
            context.drafts = state.drafts or context.drafts
            context.relayed |= state.begun
            context.answered = state.complete and context.exchange is None
            if progress is not None:
                progress.finished |= state.finished
        if state.complete or (progress is not None and progress.ended):
            last += b"" if state.complete else encoder.done()
            if context.exchange is not None:
                last += await context.exchange.finish()
            writer.end(last)
            return
        if last:
            writer.write(last)
        if relay.starved:
            failure = errors.Overloaded()
        elif state.broken:
            failure = _why_broken(state, context, backend)
        raise failure


def _why_broken(
    state: StreamState, context: RequestContext, backend: Engine
) -> errors.GatewayError:
    """Return the error of a stream of which nothing more may be passed on."""
    log.warning("stream.broken request=%s why=%s", context.request_id, state.broken)
    if state.unheld:
        return errors.FieldUnheld(state.unheld)
    if state.too_large:
        return errors.AnswerTooLarge()
    if state.error and backend.tells_fault:
        return backend.refusal(_STREAMED, state.error, context.checked.body)
    if state.error and not state.begun:
        # Some engines begin each stream with 200, and then refuse the request.
        return backend.refusal(_REFUSED, state.error, context.checked.body)
    return errors.WorkerFailed()


def _first_cause(
    error: errors.GatewayError, failure: errors.GatewayError | None, *, begun: bool
) -> errors.GatewayError:
    """Return the error for a client whose request ends with this one, after an earlier failure.

    A busy worker says when to retry, and the scheduler has the earliest such time. What a second
    worker refuses is not what ends a stream that a first one has begun, and what the others lack
    is no mistake of the client.
    """
    if failure is None:
        return error
    if isinstance(error, errors.FeatureUntaken):
        return failure
    if isinstance(failure, errors.WorkerBusy):
        return error
    if isinstance(error, errors.RefusedByWorker) and not begun:
        return error
    return failure


@dataclass(slots=True, eq=False)
class StreamRelay:
    """Relays one stream of events from a worker to a client."""

    response: upstream.UpstreamConnection
    writer: AnswerWriter
    context: RequestContext
    scanner: StreamScanner
    idle_timeout_s: float
    clock: Callable[[], float]
    collects: bool
    """The encoder collects what comes, or the calls in it."""
    begun: bool = False
    send_chunk: Callable[[bytes], None] | None = None
    lines: bytearray | None = None
    """Gets the lines that tell tokens, which are cut off the events."""
    lines_bytes: int = 0
    """Of the lines, as the memory of the request counts them."""
    moved: bool = False
    """An admin drains the worker."""
    starved: bool = False
    """There is no memory for the rest."""

    @property
    def resumable(self) -> bool:
        """Return whether another worker can go on with the stream."""
        progress = self.scanner.progress
        return progress is not None and progress.resumable and not self.scanner.state.done

    def move(self) -> None:
        """End the attempt, so that another worker goes on."""
        self.moved = True
        self.response.end(upstream.ConnectionLost("an admin drains the worker"))

    def bound_progress(self) -> None:
        """Forget what the client has of a stream that is too long to go on elsewhere."""
        progress = self.scanner.progress
        if progress is None:
            return
        more_bytes = len(progress.lines) - self.lines_bytes
        self.lines_bytes += more_bytes
        self.context.hold.count(more_bytes)
        if self.lines_bytes > _LINES_LIMIT_BYTES:
            progress.complete = False
            progress.lines.clear()

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
        progress = self.scanner.progress
        self.lines = None if progress is None else progress.lines
        return not state.broken

    def relay_chunk(self, chunk: bytes) -> bool:
        """Relay an HTTP chunk as it came, if it carries text alone; return whether it was relayed.

        Nearly every token takes this path, which changes no state.
        """
        send = self.send_chunk
        if send is None or not chunk.endswith(b"\n\n\r\n") or self.scanner.has_facts(chunk):
            return False
        lines = self.lines
        if lines is not None:
            begin = chunk.find(_LINE_BEGIN, 1, _LINE_BEGINS_BEFORE)
            end = chunk.find(b"\n", begin + len(_LINE_BEGIN)) + 1
            if begin < 0 or chunk.find(b"\n\n", end) != len(chunk) - 4:
                return False  # not one event with its line
            lines += chunk[begin + len(_LINE_BEGIN) : end]
            event = chunk[end:]
            chunk = _CHUNK_HEADS[len(event) - 2] + event
        self.writer.idle = False
        send(chunk)
        return True

    def pause(self, paused: bool) -> None:
        """Pause or resume reading the response, for a client that reads slowly."""
        self.context.read_slowly = True
        self.response.pause(paused)

    def scan(self, piece: bytes) -> bytes:
        """Scan a piece, and return what the client gets of it."""
        had_room = not self.collects or self.context.hold.count(len(piece))
        encoded = self.scanner.feed(piece)
        if not had_room and not self.scanner.state.done:
            self.starved, self.scanner.state.broken = True, "there is no memory for the rest"
        if self.context.first_token_at_s is None and self.scanner.state.content_seen:
            self.context.first_token_at_s = self.clock()
        return encoded
