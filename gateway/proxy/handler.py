"""The data plane: inspect a request, decide and forward it, account for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope

from gateway import errors
from gateway.assembly import Gateway
from gateway.auth.api_keys import ANONYMOUS
from gateway.auth.origins import comes_from_foreign_page
from gateway.fleet.fair_queue import room_for
from gateway.http.downstream import (
    RESEND,
    CancelScope,
    ClientDisconnected,
    EventWriter,
    header,
    read_body,
    response_writer,
)
from gateway.inspection_thread import Turn, is_large
from gateway.protocols.base import renamed
from gateway.protocols.documents import PDF_MARKS
from gateway.protocols.openai import InspectionContext, WireFormat
from gateway.proxy.billing import TokenReservation, default_max_tokens, estimate
from gateway.proxy.client import client_address, peer_network, read_attributes, read_caller
from gateway.proxy.context import RequestContext
from gateway.proxy.forward import Forwarder
from gateway.proxy.load_shedding import Load, RejectionPacer
from gateway.routing.select import RoutingRequest
from gateway.strict_json import encode_body, footprint_bytes, parse
from gateway.types import Caller, Headers, Inspected, RawBody
from policies.document import PolicyDocument

log = logging.getLogger(__name__)

# Of the rejections that are sent at once: guesses are worth more than repetitions.
_WRONG_SECRETS_SHARE = 0.1


def routing_request(
    gateway: Gateway, scope: Scope, policy: PolicyDocument, caller: Caller, inspected: Inspected
) -> RoutingRequest:
    """Return all routing properties of an inspected request."""
    attributes = read_attributes(
        scope, caller, policy.compiled.headers, gateway.week_clock.minute()
    )
    prefix = gateway.prefix_hasher.prefix_keys(inspected, caller, policy.prefix)
    return RoutingRequest(policy, inspected.profile, attributes, caller.pools, prefix)


async def inspect(
    gateway: Gateway,
    wire_format: WireFormat,
    body: Mapping[str, Any],
    policy: PolicyDocument,
    turn: Turn,
    *,
    caller: Caller,
) -> Inspected:
    """Read the documents of a parsed body, and inspect it; raise a `RequestRefused`."""
    context = InspectionContext(policy, gateway.fleet.view(), caller=caller)
    model, pdfs = await turn.run(wire_format.pdfs, body)
    if pdfs:
        pictures = "image" in context.reading(model).media
        documents = await gateway.documents.read(turn.hold, pdfs, pictures=pictures)
        context = context._replace(documents=documents)
    try:
        return await turn.run(wire_format.inspect, body, context)
    except errors.FieldInvalid:
        if not any(document.pages for document in context.documents.values()):
            raise
        # The pages may be too many beside the pictures of the request itself.
        texts = {pdf: one._replace(pages=()) for pdf, one in context.documents.items()}
        return await turn.run(wire_format.inspect, body, context._replace(documents=texts))


class ProxyHandler:
    """Handles generating requests; counts the running ones, so that a shutdown can drain them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.sealer = gateway.sealer
        self.forwarder = Forwarder(gateway)
        self.load = Load(gateway.settings.requests_limit, gateway.clock)
        self._rejection_pacer = RejectionPacer(gateway.clock)
        self._secret_pacer = RejectionPacer(gateway.clock, _WRONG_SECRETS_SHARE)
        self._contexts: dict[CancelScope, RequestContext] = {}
        """Of the running requests with a valid key, the oldest first."""

    async def __call__(self, scope: Scope, receive: Receive, wire_format: WireFormat) -> None:
        """Respond to one request, however it ends, and account for it once."""
        gateway = self._gateway
        client = response_writer(scope)
        writer: EventWriter = client
        if headers := wire_format.response_headers(client.request_id):
            client.add_headers(headers)
        context = RequestContext(
            request_id=client.request_id,
            wire_format=wire_format,
            policy=gateway.policy_store.current,
            began_s=gateway.clock(),
            hold=gateway.memory.hold(ANONYMOUS.caller.client),
            resends_503=bool(header(scope, RESEND)),
            trace=gateway.traces.begin(scope) if gateway.traces is not None else None,
        )
        self.load.begin()
        try:
            with CancelScope(client) as cancel_scope:
                gateway.active_requests.add(cancel_scope)
                try:
                    await self._inspect(
                        # Nothing here keeps the body, which is large where another form is too.
                        scope,
                        await self._read_body(scope, receive, context, cancel_scope),
                        context,
                    )
                    with self._reserved_tokens(context) as context.reservation:
                        client.rate_limit_headers = self._limit_headers(context)
                        writer = await wire_format.writer(client, cancel_scope)
                        await self.forwarder.forward(context, writer)
                finally:
                    gateway.active_requests.remove(cancel_scope)
                    self._contexts.pop(cancel_scope, None)
        except ClientDisconnected:
            context.disconnect()
        except asyncio.CancelledError:
            context.disconnect()
            raise
        except errors.GatewayError as error:
            context.address = client_address(scope)
            if context.begun and isinstance(error, errors.ShuttingDown):
                error = errors.Interrupted()
            await self._fail(context, writer, error, context.route_headers())
        except Exception:  # whatever a defect of ours raises: the client gets an error of its wire
            log.exception("request.broken request=%s", context.request_id)
            await self._fail(context, writer, errors.GatewayError(), [])
        finally:
            try:
                await wire_format.close()
            finally:
                self.load.end()
                context.hold.release()
                record = context.record(gateway.clock())
                gateway.accounting.account(record)
                if context.trace is not None:
                    context.trace.end(record)

    async def _read_body(
        self, scope: Scope, receive: Receive, context: RequestContext, cancel_scope: CancelScope
    ) -> RawBody:
        """Authenticate the client, then read the body and limit the time of the rest."""
        gateway = self._gateway
        settings = gateway.settings
        if scope["method"] != "POST":
            raise errors.MethodRefused("POST")
        if gateway.api_keys.required:
            try:
                api_key = gateway.api_keys.authenticate(
                    header(scope, b"authorization"), header(scope, b"x-api-key")
                )
            except errors.KeyRefused as refused:
                if isinstance(refused, errors.EndedKeyRefused):
                    context.caller = Caller(key=refused.key)
                self.load.end()  # a guess that waits takes no place of a request
                try:
                    await self.slow_guesses(scope)
                finally:
                    self.load.begin()
                raise
            context.api_key, context.caller = api_key, api_key.caller
            context.hold.client = api_key.caller.client
            cancel_scope.key_id = api_key.caller.key
        elif comes_from_foreign_page(scope["headers"], settings.allowed_origins):
            raise errors.PageRefused
        if gateway.draining:
            raise errors.ShuttingDown
        self.load.admit(functools.partial(self._make_room, context.caller.client))
        self._contexts[cancel_scope] = context
        cancel_scope.limit(settings.body_timeout_s, errors.BodyTooSlow)

        limit_bytes, hold = settings.body_limit_bytes, context.hold.add
        body = await read_body(scope, receive, limit_bytes=limit_bytes, hold=hold)
        times_s = context.policy.limits.request_timeout_s, settings.request_timeout_s
        cancel_scope.limit(min(filter(None, times_s)), errors.RequestTooLong)
        context.body_read_s = gateway.clock()
        return body

    def running_by_key(self) -> Counter[str]:
        """Return the running and waiting requests of each key."""
        return Counter(context.caller.key for context in self._contexts.values())

    def _make_room(self, client: str) -> bool:
        """Reject a request that no worker has begun in favour of a client with fewer."""
        waiting = {
            scope: context.caller.client
            for scope, context in self._contexts.items()
            if not (context.begun or scope.cancelled)
        }
        last = room_for(client, waiting)
        if last is not None:
            last.cancel(errors.Overloaded())
        return last is not None

    async def _inspect(self, scope: Scope, raw: RawBody, context: RequestContext) -> None:
        """Parse the body and everything that the policy decides by; raise a `RequestRefused`."""
        gateway, limiter = self._gateway, context.api_key.rate_limiter
        context.caller = read_caller(scope, context.policy, context.api_key)
        if not (is_large(raw) or any([mark in raw for mark in PDF_MARKS])):  # noqa: C419  # as there
            context.hold.add(footprint_bytes(raw, bounded=True))
            await self._inspect_in(
                Turn(context.hold, gateway.inspection_thread), scope, raw, context
            )
            return
        # A request that takes long is admitted before its cost is known.
        with contextlib.ExitStack() as admitted:
            if limiter is not None:
                reservation = TokenReservation(limiter, 0, gateway.clock, gateway.wall)
                admitted.enter_context(reservation)
            async with gateway.inspection_thread.turn(context.hold, raw) as turn:
                await self._inspect_in(turn, scope, raw, context)
        context.hold.add(-len(raw))  # it leaves with this call

    async def _inspect_in(
        self, turn: Turn, scope: Scope, raw: RawBody, context: RequestContext
    ) -> None:
        gateway, policy, api_key = self._gateway, context.policy, context.api_key
        body = await turn.run(parse, raw)
        wire_format, caller = context.wire_format, context.caller
        turn = turn.grown(await wire_format.open(body, caller.key, context.hold, len(raw)))
        inspected = await inspect(gateway, wire_format, body, policy, turn, caller=caller)
        context.inspected = inspected
        api_key.check_model(inspected)
        context.routing_request = request = await turn.run(
            routing_request, gateway, scope, policy, caller, inspected
        )
        size_bytes = max(len(raw), inspected.profile.text_chars)
        context.encoded = await turn.run(encode_body, inspected.body, size_bytes)
        gateway.recent_requests.add(request)

    def _reserved_tokens(
        self, context: RequestContext
    ) -> contextlib.AbstractContextManager[TokenReservation | None]:
        """Reserve the possible cost of the request, if the key has limits."""
        gateway, rate_limiter = self._gateway, context.api_key.rate_limiter
        if rate_limiter is None:
            return contextlib.nullcontext()
        if context.profile.max_tokens is None:
            workers = gateway.fleet.workers()
            reports = [one.report for one in workers if context.profile.model in one.models]
            limit = default_max_tokens(rate_limiter, [one.default_max_tokens for one in reports])
            context.limit_answer(limit)
        tokens = estimate(context.profile)
        return TokenReservation(rate_limiter, tokens, gateway.clock, gateway.wall, context.cost)

    def _limit_headers(self, context: RequestContext) -> Headers:
        """Return the headers with the rest of the key's limits, if any."""
        rate_limiter = context.api_key.rate_limiter
        if rate_limiter is None:
            return []
        unix_s = self._gateway.wall()
        states = rate_limiter.states(self._gateway.clock(), unix_s)
        return context.wire_format.limit_headers(states, unix_s)

    async def slow_guesses(self, scope: Scope) -> None:
        """Wait before the refusal of a wrong secret; a right one never waits."""
        if header(scope, b"authorization") or header(scope, b"x-api-key"):
            await asyncio.sleep(self._secret_pacer.delay_s(peer_network(scope)))

    async def _fail(
        self,
        context: RequestContext,
        writer: EventWriter,
        error: errors.GatewayError,
        headers: Headers,
    ) -> None:
        """Respond with an error, in the wire format of the request."""
        context.resends_503 &= not writer.started  # no proxy sees a status after the head
        if context.inspected is not None and (spelled := dict(context.profile.spelled)):
            error = renamed(error, lambda name: spelled.get(name, name))
        context.fail(error)
        if isinstance(error, errors.QueueFull | errors.LimitReached) and not writer.started:
            # A client that repeats rejected requests without a pause waits. Those that wait are
            # among the running requests, so they take at most half of the limit.
            delay_s = self._rejection_pacer.delay_s(context.caller.client)
            if delay_s and self.load.requests <= self._gateway.settings.requests_limit // 2:
                await asyncio.sleep(delay_s)
        writer.rate_limit_headers = self._limit_headers(context)
        await writer.fail(error, headers, context.wire_format)
