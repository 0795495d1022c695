"""One request, from its first byte to accounting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.auth.api_keys import ANONYMOUS, ApiKey
from gateway.errors import GatewayError, RequestRefused, Unavailable
from gateway.http.downstream import ClientDisconnected
from gateway.memory_budget import MemoryHold
from gateway.proxy.billing import TokenReservation, cost_of
from gateway.routing.prefix_affinity import NOTHING_EXPECTED, ExpectedReuse
from gateway.routing.select import Candidate, Decision, RoutingRequest
from gateway.strict_json import Pieces, with_fields
from gateway.telemetry.request_record import RequestRecord
from gateway.types import (
    NO_PREFIX,
    NOTHING,
    UNUSED,
    Caller,
    Drafts,
    Headers,
    Inspected,
    Outcome,
    Spent,
    Usage,
)
from paceline.protocol import NodeSource
from paceline.request.profile import RequestProfile
from policies.document import PolicyDocument

if TYPE_CHECKING:
    from gateway.protocols.base import StreamEncoder
    from gateway.protocols.engine_answer import EngineAnswer
    from gateway.protocols.event_stream import AnswerProgress
    from gateway.protocols.openai import WireFormat
    from gateway.telemetry.tracing import Trace

FAILOVERS_HEADER = b"x-paceline-failovers"
# 499: no status was sent, because the client had closed its connection; nginx logs it so.
_OK, _CLIENT_CLOSED_REQUEST = 200, 499
# Of the parts of a history, those that a header names.
_MAX_REPLACED = 32


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """One request and its history so far; `record` makes the record of its outcome.

    Each step stores its result here as an immutable value; the times are monotonic seconds.
    """

    request_id: str
    wire_format: WireFormat
    policy: PolicyDocument
    """The active policy when the request began; a later one does not change it."""
    began_s: float
    resends_503: bool = False
    """A proxy sends the request to another gateway if this one answers 503."""
    trace: Trace | None = None
    """The spans of the request, if traces are on."""
    hold: MemoryHold
    """All memory that the request holds."""
    api_key: ApiKey = ANONYMOUS
    caller: Caller = ANONYMOUS.caller
    body_read_s: float = 0.0
    inspected: Inspected | None = None
    routing_request: RoutingRequest | None = None
    encoded: Pieces = ()
    """The body for workers."""
    reservation: TokenReservation | None = None
    """The tokens reserved for the request, if its key has limits."""
    decision: Decision | None = None
    """The first one; those of further attempts exclude workers."""
    candidate: Candidate | None = None
    """Of the last attempt, as all that follows up to `unheld`."""
    waited_s: float = 0.0
    """In the queue, for the first slot."""
    engine: str = ""
    """The kind of the engine, if it is not one of Paceline's workers."""
    expected_reuse: ExpectedReuse = NOTHING_EXPECTED
    """The known part of the prompt in the worker's cache."""
    missed_reuse: str = ""
    """Why the worker read earlier turns again; empty if it did not."""
    prefix_sources: tuple[NodeSource, ...] = ()
    """Workers that had more, which the worker may fetch."""
    fingerprint: str = ""
    """Of the model that writes the stream."""
    unheld: tuple[str, ...] = ()
    """Fields that the worker does not act on."""
    attempts: int = 0
    failovers: int = 0
    """How often the request has continued at another worker."""
    worker_failures: int = 0
    """Failures of workers that had begun the request, except ones ordered by an admin."""
    dispatched_at_s: float | None = None
    begun: bool = False
    """A worker has the request and may have begun it."""
    relayed: bool = False
    """The client has received an event of the answer."""
    answered: bool = False
    """The client has received the whole answer."""
    read_slowly: bool = False
    """The worker waited for the client, so it may have reported more than the gateway has read."""
    seed: int | None = None
    """Drawn for a request without one, so that another worker would draw the same tokens."""
    encoder: StreamEncoder | None = None
    """The encoder of the stream, which a further worker continues."""
    answer_form: EngineAnswer | None = None
    """The former of the answer; None for a stream of a worker of ours without calls."""
    progress: AnswerProgress | None = None
    """The client's part of the stream, if another worker could continue it."""
    first_token_at_s: float | None = None
    usage: Usage = UNUSED
    drafts: Drafts | None = None
    outcome: Outcome = Outcome.COMPLETED
    error: GatewayError | None = None
    address: str = ""
    """The address of the client, once there is an error."""

    @property
    def checked(self) -> Inspected:
        """Return a request that has been inspected."""
        assert self.inspected is not None, "the request has not been inspected"
        return self.inspected

    @property
    def profile(self) -> RequestProfile:
        """Return the profile of a request that has been inspected."""
        return self.checked.profile

    @property
    def routed(self) -> RoutingRequest:
        """Return the routing properties of an inspected request."""
        assert self.routing_request is not None, "the request has not been inspected"
        return self.routing_request

    @property
    def cache_result(self) -> str:
        """Return whether the worker had a beginning of the prompt cached: hit, miss or none.

        Before the worker has reported usage, this is the expected result; `unknown` if the usage
        lacks cached tokens.
        """
        if self.routing_request is None or not self.routing_request.prefix.ends:
            return NO_PREFIX
        if self.usage is not UNUSED and self.usage.cached_known:
            return "hit" if self.usage.cached_tokens else "miss"
        if self.usage is not UNUSED:
            return "unknown"
        return "hit" if self.candidate and self.candidate.prefix_cached else "miss"

    def limit_answer(self, max_tokens: int | None) -> None:
        """Limit each answer; None: by the worker's default for `max_tokens`."""
        if self.inspected is not None and max_tokens is not None:
            self.inspected = self.inspected._replace(
                profile=self.inspected.profile._replace(max_tokens=max_tokens),
                body={**self.inspected.body, "max_tokens": max_tokens},
            )
            self.encoded = with_fields(self.encoded, b'"max_tokens":%d' % max_tokens)

    def record_decision(self, decision: Decision) -> None:
        """Record the first decision."""
        self.decision = self.decision or decision

    def begin(self) -> None:
        """Record that the request goes to a worker now."""
        self.begun = True

    def disconnect(self) -> None:
        """Record that the client disconnected, perhaps before the response was complete."""
        if not self.answered:
            self.outcome = Outcome.CLIENT_LEFT

    def fail(self, error: GatewayError) -> None:
        """Record the error that ended the request."""
        self.error = error
        if isinstance(error, RequestRefused):
            self.outcome = Outcome.REFUSED
        elif self.resends_503 and error.status == Unavailable.status:
            self.outcome = Outcome.RESENT
        elif isinstance(error, Unavailable):
            self.outcome = Outcome.UNSERVED
        else:
            self.outcome = Outcome.FAILED

    def cost(self, failure: BaseException | None) -> Spent:
        """Return what the request costs its key if it ends with this failure.

        The record and the reservation use it, so that both agree.
        """
        if not self.begun:
            return NOTHING
        reserved = self.reservation.tokens if self.reservation else None
        return cost_of(self.profile, self.usage, failure, reserved, read_slowly=self.read_slowly)

    def route_headers(self) -> Headers:
        """Return response headers that show where the request was routed, and why."""
        if self.candidate is None:
            return []
        profile = self.profile
        ignored, replaced = (*profile.ignored, *self.unheld), profile.replaced[:_MAX_REPLACED]
        return [
            *([(b"x-paceline-replaced", ", ".join(replaced).encode())] if replaced else ()),
            *([(b"x-paceline-ignored", ", ".join(ignored).encode())] if ignored else ()),
            (b"x-paceline-pool", self.candidate.pool.encode()),
            (b"x-paceline-worker", self.candidate.worker_id.encode()),
            (b"x-paceline-reason", self.candidate.reason.encode()),
            (b"x-paceline-prefix", self.cache_result.encode()),
            (b"x-paceline-attempts", str(self.attempts).encode()),
            *([(FAILOVERS_HEADER, b"%d" % self.failovers)] if self.failovers else ()),
        ]

    def record(self, now_s: float) -> RequestRecord:
        """Return the record of the request, which ends now."""
        error, self.error = self.error, None  # its traceback holds this context, and the body
        left = self.outcome is Outcome.CLIENT_LEFT
        first_s, tokens = self.first_token_at_s, self.usage.completion_tokens
        # Of the worker if it tells one: its last tokens may arrive at once.
        completed = self.outcome is Outcome.COMPLETED
        token_s = self.usage.token_s if completed else None
        if completed and token_s is None and first_s is not None and tokens > 1:
            token_s = (now_s - first_s) / (tokens - 1)
        return RequestRecord(
            request_id=self.request_id,
            outcome=self.outcome,
            status=error.status if error else _CLIENT_CLOSED_REQUEST if left else _OK,
            seconds=now_s - self.began_s,
            address=self.address,
            code=error.counted_as if error else "",
            reason=error.reason if error else "",
            profile=self.inspected and self.inspected.profile,
            decision=self.decision,
            candidate=self.candidate,
            engine=self.engine,
            attempts=self.attempts,
            failovers=self.failovers,
            usage=self.usage,
            waited_s=self.waited_s,
            added_s=_since(self.body_read_s + self.waited_s, self.dispatched_at_s),
            first_token_s=_since(self.body_read_s, first_s),
            token_s=token_s,
            drafts=self.drafts,
            caller=self.caller,
            spent=self.cost(error or (ClientDisconnected() if left else None)),
            prefix=self.cache_result,
            missed_reuse=self.missed_reuse,
        )


def _since(began_s: float, later_s: float | None) -> float | None:
    return None if later_s is None else later_s - began_s
