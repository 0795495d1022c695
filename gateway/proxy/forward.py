"""Forward a request to a worker and relay the response; continue at another worker if one fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from urllib.parse import quote

from pydantic_core import to_json

from gateway import errors
from gateway.assembly import Gateway
from gateway.engines.base import Engine, Isolation, Told
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.health import CHECK_REFUSALS
from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S, Lease
from gateway.http import upstream
from gateway.http.downstream import JSON_HEADERS, KEEPALIVE, EventWriter, ResponseWriter
from gateway.protocols.base import AnswerMalformed
from gateway.protocols.engine_answer import CALLS, EngineAnswer, FieldUnheld
from gateway.protocols.event_stream import AnswerProgress, StreamScanner
from gateway.proxy.context import RequestContext
from gateway.proxy.quarantine import Quarantine
from gateway.proxy.relay import KeepAlive, StreamRelay, log_calls
from gateway.proxy.retry_budget import RetryBudget
from gateway.strict_json import (
    Pieces,
    encode_body,
    footprint_bytes,
    parse_answer,
    size_of,
    with_fields,
)
from gateway.types import UNUSED
from paceline.protocol import ANSWER_FIELD, KEEPALIVE_S, MODEL_HEADER, PROGRESS_HEADER
from paceline.request.call_rules import read_call_rules
from paceline.request.fields import CACHE_SALT
from paceline.request.profile import GENERATING
from paceline.request.wires import WIRE_OF

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
_SEED_BITS = 53
# So long after the estimated time for its prompt, a retry lets the next one begin.
_READ_MARGIN_S = 1.0
# Far more than any answer has; a worker that never ends one must not fill the memory.
_WHOLE_LIMIT_BYTES = 64 * 1024 * 1024
_CALLS = CALLS.encode()
# Queued requests that workers check at a time.
_MAX_CHECKS = 8


class Forwarder:
    """Forwards requests to workers within the settings' limits on time."""

    def __init__(self, gateway: Gateway) -> None:
        self._settings = settings = gateway.settings
        self._keepalive_s = gateway.timing.keepalive_s
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
        self.connections.fleet_tls = gateway.fleet_tls
        self.retries = RetryBudget()
        self.quarantine = Quarantine()

    async def forward(self, context: RequestContext, writer: EventWriter) -> None:
        """Relay the response of the first worker that takes the request; raise a `GatewayError`."""
        if self.quarantine.holds(context.encoded, self._clock()):
            raise errors.Quarantined
        self.retries.active += 1
        try:
            with self._keep_alive(context, writer):
                whole = await self._try_workers(context, writer)
        finally:
            self.retries.active -= 1
        if whole is not None:  # a client that reads it slowly occupies no slot
            await writer.whole(200, [*JSON_HEADERS, *context.route_headers()], whole)

    async def check(self) -> None:
        """Check the deadlines of attempts, also of those whose workers send no heartbeats more."""
        silent = tuple(f"{url}/" for url in self._fleet.silent_urls())
        self.connections.check(silent, HEARTBEAT_TIMEOUT_S)
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
        self, context: RequestContext, writer: EventWriter
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context that keeps the stream of a client alive, and no other response."""
        if not context.profile.stream or not isinstance(writer, ResponseWriter):
            return contextlib.nullcontext()

        def comment() -> bytes:
            place = self._scheduler.queue_place(context.routed)
            return context.wire_format.keep_alive(KEEPALIVE if place is None else place.comment())

        def check() -> None:
            task = asyncio.create_task(self._check_queued(context))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

        return KeepAlive(writer, self._keepalive_s, comment, check)

    async def _check_queued(self, context: RequestContext) -> None:
        """Let a worker check a queued request, and reject it if the worker would refuse it.

        Before an early head such a refusal still has a status of its own.
        """
        request, decision = context.routed, context.decision
        for candidate in decision.candidates if decision is not None else ():
            worker = self._fleet.get(candidate.worker_id)
            if worker is None or not worker.backend.sends_reports:
                continue
            async with self._check_slots:
                if self._scheduler.queue_place(request) is None:
                    return
                headers = worker.backend.headers(Told(candidate.worker_id, candidate.lane))
                path = WIRE_OF[context.profile.endpoint]
                checked = await self._control.check(worker.report, path, context.encoded, headers)
            if checked is not None and checked[0] in CHECK_REFUSALS:
                error = worker.backend.refusal(checked[0], to_json(checked[1]), {})
                if isinstance(error, errors.RefusedByWorker):
                    self._scheduler.reject(request, error)
            return

    async def _try_workers(self, context: RequestContext, writer: EventWriter) -> bytes | None:
        """Try one worker after another, each once, as long as the policy allows another one.

        Return a whole answer. After several failures, raise the first cause.
        """
        tried: frozenset[str] = frozenset()
        turn: contextlib.ExitStack | None = None
        failed: errors.GatewayError | None = None
        earlier: errors.GatewayError | None = None
        try:
            while True:
                lease = await self._acquire(context, tried)
                whole, failed = await self._attempt(lease, context, writer, turn)
                if failed is None:
                    return whole
                if not self._may_continue(failed, lease, context):
                    raise failed
                # The fleet leaves out a busy worker itself, for as long as it is busy.
                if not isinstance(failed, errors.WorkerBusy):
                    tried |= {lease.candidate.worker_id}
                earlier = failed
                # A request that probed a worker waits for no other; such requests are few.
                if not lease.on_probation:
                    turn = await self.retries.begin(context.policy.retries)
        except _ENDS_RETRIES as last:
            raise _first_cause(last, earlier, begun=context.relayed) from None
        finally:
            if turn is not None:
                turn.close()
            failed = earlier = None  # their tracebacks hold this frame, and so the body

    async def _attempt(
        self,
        lease: Lease,
        context: RequestContext,
        writer: EventWriter,
        turn: contextlib.ExitStack | None,
    ) -> tuple[bytes | None, errors.GatewayError | None]:
        """Let one worker answer; return its whole answer, or the failure.

        The slot is released however the attempt ends, and the worker's circuit breaker gets the
        result.
        """
        result, retry_after_s = AttemptResult.ABANDONED, 0.0
        try:
            whole = await self._exchange(lease, context, writer, turn)
            result = AttemptResult.SUCCEEDED
            self.quarantine.answered(context.encoded)
            return whole, None
        except errors.GatewayError as error:
            result = next(one for kind, one in _ATTEMPT_RESULTS if isinstance(error, kind))
            retry_after_s = error.retry_after_s or 0.0
            boot, now_s = "/".join(lease.boot), self._clock()
            if result in _FAILURES and not self.quarantine.failed(context.encoded, boot, now_s):
                result = AttemptResult.ABANDONED
            return None, error.with_traceback(None)
        finally:
            self._scheduler.release(lease, result, retry_after_s)
            self._record_prefix_usage(context, lease)

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
        prefix = context.routed.prefix
        if prefix.ends:
            usage = None if context.usage is UNUSED else context.usage
            context.missed_reuse = self._prefix_index.record_usage(
                prefix, lease.boot, usage, context.expected_reuse
            )

    def _may_continue(
        self, error: errors.GatewayError, lease: Lease, context: RequestContext
    ) -> bool:
        """Return whether the request goes to another worker after this error, and count it.

        Generating has no side effects, so a request may run again. Of workers that had begun it,
        only so many may fail as the policy allows, and only one of them may have crashed before
        its answer began: that may be the fault of the prompt.
        """
        absence = self._fleet.absence(lease.candidate.worker_id)
        left = absence is not None and absence[0] == "left"
        # Somebody stops the worker.
        ordered = left or lease.state.report.draining or isinstance(error, errors.WorkerMoved)
        if isinstance(error, errors.WorkerLost) and not ordered:
            self.quarantine.lost(context.encoded, "/".join(lease.boot), self._clock())
        again = isinstance(error, errors.WorkerError) and (
            lease.on_probation or self.retries.allows(context.policy.retries)
        )
        if isinstance(error, _NEVER_BEGUN):
            context.begun = context.failovers > 0
        else:
            context.worker_failures += not ordered
            again = again and self._may_run_again(context)
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

    def _may_run_again(self, context: RequestContext) -> bool:
        """Return whether another worker may run a request after one that had begun it failed."""
        if size_of(context.encoded) > _FAILOVER_LIMIT_BYTES:
            return False
        if context.worker_failures > context.policy.retries.per_request:
            return False
        if context.relayed:
            return context.progress is not None and context.progress.resumable
        return not self.quarantine.holds(context.encoded, self._clock())

    async def _body_for(self, lease: Lease, context: RequestContext) -> Pieces:
        """Return the body for one worker."""
        backend, body, profile = lease.state.backend, context.encoded, context.profile
        salt = "" if backend.sends_reports else self._scope_of(context)
        fields = context.checked.body
        body = await self._thread.run(size_of(body), backend.body, body, fields, salt)
        if not backend.continues_streams or profile.endpoint not in GENERATING:
            return body
        more = []
        if (
            profile.sampling.seed is None
            and not profile.sampling.greedy
            and lease.state.report.fingerprint  # else nobody continues, and a seed may cost a batch
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

    def _prepare_progress(self, lease: Lease, context: RequestContext) -> None:
        """Make a worker report the tokens of a stream, if another one could continue it."""
        continues = (
            context.profile.stream
            and lease.state.backend.continues_streams
            and context.policy.retries.per_request > 0
            and size_of(context.encoded) <= _FAILOVER_LIMIT_BYTES
            and lease.state.report.fingerprint
        )
        context.fingerprint = lease.state.report.fingerprint
        context.progress = AnswerProgress() if continues else None

    async def _exchange(
        self,
        lease: Lease,
        context: RequestContext,
        writer: EventWriter,
        turn: contextlib.ExitStack | None,
    ) -> bytes | None:
        """Send the request to one worker; return its whole answer, or relay its stream."""
        backend, fields = lease.state.backend, context.checked.body
        if not context.relayed:
            self._prepare_progress(lease, context)
        response = await self._respond(lease, context, turn)
        try:
            if response.status != 200:
                idle_timeout_s = self._settings.idle_timeout_s
                raise await upstream.refusal(response, idle_timeout_s, backend.refusal, fields)
            self._scheduler.record_taken(lease)
            if not context.profile.stream:
                return await self._read_whole(response, context, backend)
            relay = self._relay(response, context, writer, backend)
            self._relays.add(relay)
            try:
                await relay.run()
            finally:
                self._relays.discard(relay)
            return None
        finally:
            response.release()

    async def _respond(
        self, lease: Lease, context: RequestContext, turn: contextlib.ExitStack | None
    ) -> upstream.UpstreamConnection:
        """Send the request, once more if the connection was stale; return the response to it.

        Until the worker should have read the prompt, a retry counts against the budget.
        """
        timer = None
        try:
            body = await self._body_for(lease, context)
            if turn is not None:
                read_s = lease.candidate.prefill_s + _READ_MARGIN_S
                timer = asyncio.get_running_loop().call_later(read_s, turn.close)
            return await self._send(lease, body, context)
        except upstream.StaleConnection:
            if not self.retries.allows(context.policy.retries):
                raise
            try:
                return await self._send(lease, body, context, fresh=True)
            except errors.WorkerUnreachable as error:
                # Perhaps the connection was not stale, but the worker died of this request.
                raise errors.WorkerLost from error
        finally:
            if turn is not None:
                turn.close()
            if timer is not None:
                timer.cancel()

    async def _send(
        self, lease: Lease, body: Pieces, context: RequestContext, *, fresh: bool = False
    ) -> upstream.UpstreamConnection:
        """Send the request, and again if the worker reports that it may need more tokens."""
        context.attempts += 1
        context.dispatched_at_s = context.dispatched_at_s or self._clock()
        backend, candidate, reservation = lease.state.backend, lease.candidate, context.reservation
        asked_model, profile = context.checked.asked_model, context.profile
        headers = {"content-type": "application/json", "x-request-id": context.request_id}
        if context.trace is not None:
            headers |= context.trace.attempt(profile, candidate)
        if context.progress is not None:
            headers[PROGRESS_HEADER] = "1"
        if backend.sends_reports and asked_model != profile.model:
            headers[MODEL_HEADER] = quote(asked_model)
        scope = self._scope_of(context) or "all"
        limit = None if reservation is None else reservation.token_limit
        prefix, sources = context.routed.prefix, context.prefix_sources
        told = Told(candidate.worker_id, candidate.lane, prefix, scope, limit, sources)
        headers |= backend.headers(told)
        url = lease.state.report.url + WIRE_OF[profile.endpoint]
        server_name = backend.server_name(candidate.worker_id)
        send = functools.partial(self.connections.send, server_name=server_name)
        response = await send(url, body, headers, context.begin, fresh=fresh)
        tokens = response.tokens
        if response.status == 200 or not tokens or reservation is None or limit is None:
            return response
        response.release()
        reservation.resize(tokens)
        headers |= backend.headers(told._replace(token_limit=reservation.token_limit))
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
            run, size_bytes = self._thread.run, len(body)  # vectors may take 64 MB
            context.hold.add(await run(size_bytes, footprint_bytes, body))
            answer = await run(size_bytes, parse_answer, body)
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
        named = answer.get("model") == context.checked.asked_model
        # A worker of ours writes the form itself, as in its streams, up to that of calls.
        formed = named and backend.sends_reports and _CALLS not in body
        try:
            if not formed:
                form = context.answer_form = self._answer_form(context, backend)
                changed = form.read(answer, "message")
                log_calls(context)
                if changed:
                    body = b"".join(await run(size_bytes, encode_body, answer, size_bytes))
            encoded = context.wire_format.encode(context.routed, answer, body)
        except FieldUnheld as error:
            raise errors.FieldUnheld(str(error)) from error
        except AnswerMalformed as error:
            raise errors.WorkerFailed from error
        return await context.wire_format.finish() if context.wire_format.finishes else encoded

    @staticmethod
    def _answer_form(context: RequestContext, backend: Engine) -> EngineAnswer:
        """Return the former of an answer."""
        inspected, own = context.checked, backend.sends_reports
        rules = read_call_rules(inspected.body)
        if own:  # a grammar holds its model to a prescribed call
            rules = rules._replace(forced=False)
        return EngineAnswer(secrets.token_hex(8), inspected.asked_model, rules, ends=not own)

    def _relay(
        self,
        response: upstream.UpstreamConnection,
        context: RequestContext,
        writer: EventWriter,
        backend: Engine,
    ) -> StreamRelay:
        """Return the relay of an attempt, which continues the client's stream."""
        own = backend.sends_reports
        if not context.relayed or context.encoder is None:
            late_headers = context.route_headers() if writer.started else ()
            context.encoder = context.wire_format.encoder(context.routed, late_headers)
            context.answer_form = None if own else self._answer_form(context, backend)
        context.encoder.failovers = context.failovers

        def calls() -> EngineAnswer:
            """Return the reader of the calls of a worker of ours, which a further one continues."""
            context.answer_form = context.answer_form or self._answer_form(context, backend)
            return context.answer_form

        scanner = StreamScanner(
            context.encoder,
            context.wire_format.keep_alive,
            backend,
            answer=None if own else context.answer_form,
            calls=calls if own else None,
            progress=context.progress,
        )
        if context.relayed and context.progress is not None:
            scanner.state.finished = context.progress.finished
        idle_timeout_s, answer_timeout_s = (
            min(one, _STALLED_S) if backend.continues_streams else one
            for one in (self._settings.idle_timeout_s, self._settings.answer_timeout_s)
        )
        response.set_read_timeout(answer_timeout_s)
        collects = not context.encoder.passthrough or bool(context.checked.body.get("tools"))
        return StreamRelay(
            response, writer, context, scanner, backend, idle_timeout_s, self._clock, collects
        )


def _first_cause(
    error: errors.GatewayError, failure: errors.GatewayError | None, *, begun: bool
) -> errors.GatewayError:
    """Return the error for a client whose request ends with this one, after an earlier failure.

    A busy worker says when to retry, and the scheduler has the earliest such time. A second
    worker's refusal does not explain the end of a stream that the first one began, and a feature
    that the others lack is not the client's mistake.
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
