"""What can go wrong between a client and a worker, as one tree of errors.

StartRefused                the gateway cannot start; one sentence for the person at the terminal
GatewayError                one request cannot be answered as asked
+-- RequestRefused          the request is at fault
|   +-- NotHttp             400  the bytes are no HTTP/1.1 request
|   +-- BodyNotJson         400  the body is no JSON object
|   +-- TokensOverLimit     400  more tokens than the key ever has at once
|   +-- FieldInvalid        400  one field is wrong; `param` names it
|   +-- PolicyRefused       400  a document that cannot be the policy; every reason is named
|   +-- KeyRefused          401  no key, or not a known one
|   |   +-- KeyEnded        401  the key was revoked, or expired, while the request ran
|   +-- NotAllowedHere      403  this route is not open to this caller
|   |   +-- PageRefused     403  a page of another site, and no key is asked for
|   +-- PoolsNotAllowed     403  the key may use none of the pools of the route
|   +-- PathUnknown         404  no such route
|   +-- ModelUnknown        404  neither the policy nor the fleet knows the model
|   +-- KeyUnknown          404  no key of that id
|   +-- WorkerUnknown       404  no worker of that id has joined
|   +-- VersionUnknown      404  the policy has no version of that number
|   +-- MethodRefused       405  the route exists, the method does not
|   +-- HeadTooSlow         408  the head did not arrive in time
|   +-- BodyTooSlow         408  the body did not arrive in time
|   +-- WorkerIdTaken       409  another live worker holds that id
|   +-- KeyIsRevoked        409  a revoked key cannot be changed
|   +-- EditOvertaken       412  another edit of the policy came first
|   +-- BodyTooLarge        413  counted while reading
|   +-- MediaTypeRefused    415  a body of a kind that the route does not read
|   +-- HostRefused         421  asked under a name that is not this gateway's
|   +-- EditUnconditional   428  an edit that does not say what it was made from
|   +-- HeadTooLarge        431  too many header bytes, or too many headers
|   +-- Quarantined         422  two workers were lost over this very body
|   +-- LimitReached        429  the key has used what it may for now
|   +-- RefusedByWorker     4xx  the worker says why, in OpenAI's shape
+-- NoWorker                503  nobody can take it now
+-- QueueFull               503  too many wait for the same pool already
+-- QueueTimeout            503  no slot became free in the time that a request may wait
+-- Stopping                503  the gateway is ending
+-- Overloaded              503  this gateway has all it can carry
+-- TooManyViewers          503  as many watch the state as may
+-- RecordsUnwritable       503  what an admin wants kept cannot be kept now
|   +-- EditUnanswered      503  ... or was not answered in time, and may be kept
+-- RequestTooLong          504  the whole request took longer than any may take
+-- WorkerError             the worker is at fault
    +-- WorkerUnreachable   503  no connection, so nothing can have started
    +-- WorkerBusy          503  the worker asks to come back later
    +-- WorkerLost          502  the connection broke before the answer was complete
    +-- WorkerFailed        502  the worker says it failed, or answers nonsense
    +-- WorkerSilent        504  no answer began in time
    +-- WorkerStalled       504  the answer paused for too long

The branch of refusals is in `refusals.py`; `error_answers.py` renders all of them.
"""

from __future__ import annotations


class StartRefused(Exception):
    """The gateway cannot start; the message is one sentence that says what to change."""


class GatewayError(Exception):
    """One request cannot be answered as asked; the message is written for the client."""

    status = 500
    type = "server_error"
    code = "internal_error"
    message = "The gateway failed on this request."
    param: str | None = None
    retry_after_s: float | None = None

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message or self.message)
        if message is not None:
            self.message = message
        if param is not None:
            self.param = param

    @property
    def counted_as(self) -> str:
        """Name it for counts: one of a few names, all of them ours."""
        return self.code


class RequestRefused(GatewayError):
    """The request is at fault; sending it again changes nothing."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class NoWorker(GatewayError):
    """No worker of any pool of the route can take the request now."""

    status = 503
    type = "overloaded_error"
    code = "no_worker"
    message = "No worker can take this request now."
    retry_after_s = 2.0


class QueueFull(GatewayError):
    """As many requests wait for the pool as may wait for it."""

    status = 503
    type = "overloaded_error"
    code = "queue_full"
    message = "All slots are taken, and too many requests wait for one already."

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class QueueTimeout(QueueFull):
    """No slot became free while the request was allowed to wait."""

    code = "queue_timeout"
    message = "No slot became free in the time that a request may wait for one."


class Stopping(GatewayError):
    """The gateway is ending and takes or finishes no more work."""

    status = 503
    type = "overloaded_error"
    code = "gateway_stopping"
    message = "The gateway is stopping."
    retry_after_s = 2.0


class Overloaded(GatewayError):
    """The gateway has all it can carry: those it has come first."""

    status = 503
    type = "overloaded_error"
    code = "gateway_overloaded"
    message = "The gateway is overloaded; try again in a moment."
    retry_after_s = 1.0


class TooManyViewers(GatewayError):
    """As many watch the events of the state as may at a time."""

    status = 503
    type = "overloaded_error"
    code = "too_many_viewers"
    message = "Too many watch the state of this gateway already; GET /v1/status still answers."
    retry_after_s = 10.0


class RecordsUnwritable(GatewayError):
    """What was to be kept or read cannot be."""

    status = 503
    type = "server_error"
    code = "state_unavailable"
    message = "The gateway's state cannot be read or written now."
    retry_after_s = 2.0


class EditUnanswered(RecordsUnwritable):
    """Nobody said in time whether an edit was kept, and it may be."""

    code = "edit_unanswered"
    message = (
        "The gateway's state did not answer in time, so this change may be kept or not. Look before"
        " trying again; once a policy is kept, the same If-Match gets 412."
    )


class RequestTooLong(GatewayError):
    """The whole request, from its body to its last byte, took longer than any may take."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"
    message = "The answer was not complete in the time that a request may take."


class WorkerError(GatewayError):
    """The worker is at fault; what exactly happened stands in the log."""

    status = 502
    code = "worker_error"


class WorkerUnreachable(WorkerError):
    """No connection could be made, so nothing can have started there."""

    status = 503
    type = "overloaded_error"
    code = "worker_unreachable"
    message = "The worker cannot be reached."
    retry_after_s = 2.0


class WorkerBusy(WorkerError):
    """The worker took nothing and asks to come back later."""

    status = 503
    type = "overloaded_error"
    code = "workers_busy"
    message = "All workers for this request are busy."

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class WorkerLost(WorkerError):
    """The connection to the worker broke before its answer was complete."""

    code = "worker_lost"
    message = "The worker was lost before its answer was complete."


class WorkerFailed(WorkerError):
    """The worker said that it failed, or answered what is no answer."""

    code = "worker_failed"
    message = "The worker failed on this request."


class WorkerSilent(WorkerError):
    """Nothing came from the worker in the time allowed."""

    status = 504
    type = "timeout_error"
    code = "worker_silent"
    message = "The worker did not answer in time."


class WorkerStalled(WorkerSilent):
    """The answer began, and then nothing more came in the time allowed."""

    code = "worker_stalled"
    message = "The worker paused for too long in its answer."
