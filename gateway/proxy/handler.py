"""The data plane: one request, four steps, and whatever ends it early."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.assembly import Gateway
from gateway.auth.api_keys import ANONYMOUS, ApiKey
from gateway.auth.origins import comes_from_foreign_page
from gateway.errors import (
    BodyTooSlow,
    GatewayError,
    KeyEnded,
    MethodRefused,
    NoWorker,
    PageRefused,
    RequestRefused,
    RequestTooLong,
    ShuttingDown,
)
from gateway.http.downstream import (
    CancelScope,
    ClientLeft,
    Receive,
    ResponseWriter,
    Scope,
    header,
    read_body,
)
from gateway.protocols.openai import inspect
from gateway.proxy.billing import NOTHING, HeldTokens, cost_of
from gateway.proxy.client import read_asker, read_caller
from gateway.proxy.context import RequestContext, route_headers
from gateway.proxy.forward import Forwarder
from gateway.proxy.load_shedding import Load
from gateway.routing.select import RoutingRequest
from gateway.telemetry.request_record import RequestRecord
from gateway.types import NO_PREFIX, UNUSED, Inspected, Outcome
from policies.document import PolicyDocument
from policies.request.profile import Endpoint

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Trace

log = logging.getLogger(__name__)

ENDPOINTS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
}
# Not a status that was sent: nobody was there to read one. nginx logs it so.
_CLIENT_CLOSED = 499


@dataclass(slots=True)
class _Steps:
    """What the steps of one request have brought so far."""

    policy: PolicyDocument
    """What was in force when the request came, and its own to its end."""
    body_bytes: int = 0
    holder: ApiKey = ANONYMOUS
    inspected: Inspected | None = None
    trip: RequestContext | None = None
    trace: Trace | None = None


class ProxyHandler:
    """Answers generating requests; counts those that run, so that an ending can wait for them."""

    def __init__(self, line: Gateway) -> None:
        self._line = line
        self.upstream = Forwarder(
            line.settings, line.worker_keys, line.scheduler, line.prefix_index, line.clock
        )
        line.api_keys.on_end = self._end_keys
        self.load = Load(line.settings.requests_limit)
        self._present: dict[CancelScope, _Steps] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def drained(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    def _end_keys(self, ended: frozenset[str]) -> None:
        """End what still runs for these keys: streams with an error event."""
        for presence, steps in tuple(self._present.items()):
            if steps.holder.caller.key in ended:
                presence.end(KeyEnded())

    def cut(self) -> None:
        """End what still runs: whole answers with an error, streams with an error event."""
        for presence in tuple(self._present):
            presence.end(ShuttingDown())

    async def __call__(self, scope: Scope, receive: Receive, endpoint: Endpoint) -> None:
        """Answer one request, whatever comes, and account for it once."""
        self._enter()
        reply = ResponseWriter(scope)
        steps = _Steps(self._line.policy_store.current)
        began_s = self._line.clock()
        if self._line.traces is not None:
            steps.trace = self._line.traces.begin(scope)
        outcome, error = Outcome.COMPLETED, None
        try:
            with CancelScope(scope) as presence:
                self._present[presence] = steps
                try:
                    raw = await self._body(scope, receive, steps, presence)
                    await self._answer(scope, raw, endpoint, reply, steps)
                finally:
                    del self._present[presence]
        except ClientLeft:
            outcome = Outcome.CLIENT_LEFT
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_LEFT
            raise
        except GatewayError as failure:
            error, outcome = failure, _outcome(failure)
            if (allowance := steps.holder.rate_limiter) is not None:
                reply.limits = allowance.headers(self._line.clock(), self._line.wall())
            await reply.fail(failure, route_headers(steps.trip) if steps.trip else ())
        except Exception:
            log.exception("request.broken request=%s", reply.identity)
            error, outcome = GatewayError(), Outcome.FAILED
            await reply.fail(error)
        finally:
            self._exit(steps)
            served = self._served(reply.identity, outcome, error, steps, began_s)
            self._line.accounting.account(served)
            if steps.trace is not None:
                steps.trace.end(served)

    async def _body(
        self, scope: Scope, receive: Receive, steps: _Steps, presence: CancelScope
    ) -> bytes:
        """Read the body of a request that may be taken; from here on its time is limited."""
        settings = self._line.settings
        if scope["method"] != "POST":
            raise MethodRefused("POST")
        if self._line.api_keys.required:
            steps.holder = self._line.api_keys.authenticate(header(scope, b"authorization"))
        elif comes_from_foreign_page(scope["headers"]):
            raise PageRefused
        if self._line.drain_state.draining:
            raise ShuttingDown
        self.load.admit()
        presence.limit(settings.body_timeout_s, BodyTooSlow())

        def hold(part_bytes: int) -> None:
            steps.body_bytes += part_bytes
            self.load.hold(part_bytes)

        raw = await read_body(scope, receive, limit_bytes=settings.body_limit_bytes, hold=hold)
        time_s = steps.policy.limits.request_time_s(settings.request_timeout_s)
        presence.limit(time_s, RequestTooLong())
        return raw

    async def _answer(
        self,
        scope: Scope,
        raw: bytes,
        endpoint: Endpoint,
        reply: ResponseWriter,
        steps: _Steps,
    ) -> None:
        line, policy = self._line, steps.policy
        began_s = line.clock()
        caller = read_caller(scope, policy, steps.holder)
        asker = read_asker(scope, caller, policy.compiled.headers, line.week_clock.minute())
        fleet = line.fleet.view()
        inspected = steps.inspected = inspect(raw, endpoint, policy, fleet)
        steps.holder.check_model(inspected)
        prefix = line.prefix_names.prefix_key(inspected, caller, policy.prefix)
        case = RoutingRequest(policy, inspected.profile, asker, caller.pools, prefix)
        line.recent_requests.add(case)
        trip = steps.trip = RequestContext(
            identity=reply.identity,
            inspected=inspected,
            case=case,
            caller=caller,
            began_s=began_s,
            trace=steps.trace,
        )
        allowance = steps.holder.rate_limiter
        if allowance is None:
            await self.upstream.forward(trip, reply)
            return
        with HeldTokens(allowance, trip, line.clock, line.wall) as reply.limits:
            await self.upstream.forward(trip, reply)

    def _served(
        self,
        identity: str,
        outcome: Outcome,
        error: GatewayError | None,
        steps: _Steps,
        began_s: float,
    ) -> RequestRecord:
        status = _CLIENT_CLOSED if outcome is Outcome.CLIENT_LEFT else 200
        trip = steps.trip
        now_s = self._line.clock()
        return RequestRecord(
            request_id=identity,
            outcome=outcome,
            status=error.status if error else status,
            code=error.counted_as if error else "",
            seconds=now_s - began_s,
            inspected=steps.inspected,
            decision=trip.decision if trip else None,
            candidate=trip.candidate if trip else None,
            attempts=trip.attempts if trip else 0,
            usage=trip.usage if trip else UNUSED,
            waited_s=trip.waited_s if trip else 0.0,
            added_s=_since(trip.began_s + trip.waited_s, trip.dispatched_s) if trip else None,
            first_token_s=_since(trip.began_s, trip.first_token_s) if trip else None,
            token_s=_token_s(trip, now_s) if trip and outcome is Outcome.COMPLETED else None,
            drafts=trip.drafts if trip else None,
            caller=steps.holder.caller,
            spent=cost_of(trip, error) if steps.holder.caller.key else NOTHING,
            prefix=trip.prefix if trip else NO_PREFIX,
        )

    def _enter(self) -> None:
        self.load.requests += 1
        self._idle.clear()

    def _exit(self, steps: _Steps) -> None:
        self.load.requests -= 1
        self.load.release(steps.body_bytes)
        if not self.load.requests:
            self._idle.set()


def _outcome(error: GatewayError) -> Outcome:
    if isinstance(error, RequestRefused):
        return Outcome.REFUSED
    nobody = error.status == NoWorker.status
    return Outcome.UNSERVED if nobody else Outcome.FAILED


def _token_s(trip: RequestContext, ended_s: float) -> float | None:
    """Tell how long each token after the first one took; None where there is nothing to tell by."""
    further = trip.usage.completion_tokens - 1
    if trip.first_token_s is None or further < 1:
        return None
    return (ended_s - trip.first_token_s) / further


def _since(began_s: float, later_s: float | None) -> float | None:
    return None if later_s is None else later_s - began_s
