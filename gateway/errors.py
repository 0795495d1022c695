"""What can go wrong between a client and a worker, as one tree of errors.

StartRefused                the gateway cannot start; one sentence for the person at the terminal
GatewayError                one request cannot be answered as asked
+-- RequestRefused          the request is at fault
|   +-- NotHttp             400  the bytes are no HTTP/1.1 request
|   +-- BodyNotJson         400  the body is no JSON object
|   +-- TokensOverLimit     400  more tokens than the key ever has at once
|   +-- FieldInvalid        400  one field is wrong; `param` names it
|   |   +-- NoteMissing     400  an edit of the policy gives no reason
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

Why a request is refused: the branch of `errors.py` where the request is at fault.

The one place that renders errors: as a body, as the last event of a stream, as headers.
"""

from __future__ import annotations

import math

from pydantic_core import to_json

from gateway.types import Headers
from workers.protocol import error_body


class StartupError(Exception):
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


class ShuttingDown(GatewayError):
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


class WriteUnconfirmed(RecordsUnwritable):
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


class NotHttp(RequestRefused):
    """The bytes are no HTTP/1.1 request."""

    code = "invalid_http"
    message = "This is no valid HTTP/1.1 request."


class BodyNotJson(RequestRefused):
    """The body is not one strict JSON object."""

    code = "invalid_json"
    message = "The body must be one JSON object in UTF-8."


class FieldInvalid(RequestRefused):
    """One field of the body is missing, wrong or unknown."""

    code = "invalid_value"


class NoteMissing(FieldInvalid):
    """An edit of the policy gives no reason."""

    message = "An edit needs a note in 'x-paceline-note'."
    param = "x-paceline-note"


class PolicyRefused(RequestRefused):
    """What was sent cannot be the policy; every reason is named."""

    code = "invalid_policy"

    def __init__(self, problems: str, *, param: str | None) -> None:
        super().__init__(f"The policy is not usable: {problems}.", param=param)


class KeyRefused(RequestRefused):
    """No key came along, or one that is not known; the answer is the same for both."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    message = "A valid key is needed: 'Authorization: Bearer KEY'."


class KeyEnded(KeyRefused):
    """The key was revoked, or expired, while its request ran."""

    code = "key_revoked"
    message = "The key of this request was revoked or has expired."


class PoolsNotAllowed(RequestRefused):
    """The key may use none of the pools that the policy has for the request."""

    status = 403
    type = "permission_error"
    code = "pool_not_allowed"
    message = "This key may use none of the pools that requests like this one go to."


class NotAllowedHere(RequestRefused):
    """The route is closed to this caller."""

    status = 403
    type = "permission_error"
    code = "not_allowed"
    message = "Without PACELINE_ADMIN_KEY this route answers only on the gateway's own machine."


class PageRefused(NotAllowedHere):
    """A web page of another site asks a gateway that wants no key."""

    message = (
        "This gateway asks for no key, so it takes nothing from web pages of other sites. Make a "
        "key with `paceline keys create` and send that."
    )


class PathUnknown(RequestRefused):
    """There is no such route."""

    status = 404
    code = "unknown_path"
    message = "There is no such route."


class ModelUnknown(RequestRefused):
    """Neither the policy nor any worker knows the model."""

    status = 404
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model[:100]}' does not exist. GET /v1/models lists those that do."
        )


class KeyUnknown(RequestRefused):
    """No key of that id was ever made."""

    status = 404
    code = "key_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"There is no key '{name[:100]}'.")


class WorkerUnknown(RequestRefused):
    """No worker of that id has joined."""

    status = 404
    code = "worker_not_found"
    message = "No worker of this id has joined."


class VersionUnknown(RequestRefused):
    """There is no version of the policy with that number."""

    status = 404
    code = "unknown_version"
    param = "version"

    def __init__(self, number: int | str) -> None:
        super().__init__(f"The policy has no version '{str(number)[:100]}'.")


class MethodRefused(RequestRefused):
    """The route exists, but not with this method."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This route takes {allowed} only.")
        self.allowed = allowed


class HeadTooSlow(RequestRefused):
    """The head of the request did not arrive in time."""

    status = 408
    code = "head_too_slow"
    message = "The headers of the request did not arrive in time."


class BodyTooSlow(RequestRefused):
    """The body did not arrive in time."""

    status = 408
    code = "body_too_slow"
    message = "The body did not arrive in time."


class WorkerIdTaken(RequestRefused):
    """Another live worker, on another address, holds that id."""

    status = 409
    code = "worker_id_taken"
    message = "Another live worker holds this id; start this one with another id."


class KeyIsRevoked(RequestRefused):
    """A revoked key stays as it is."""

    status = 409
    code = "key_is_revoked"

    def __init__(self, name: str) -> None:
        super().__init__(f"The key '{name[:100]}' is revoked for good; make a new one.")


class VersionConflict(RequestRefused):
    """Another version came between the one that was edited and this edit."""

    status = 412
    code = "policy_changed"
    param = "if-match"

    def __init__(self, number: int, author: str) -> None:
        super().__init__(
            f"Somebody was faster: version {number} of the policy, by {author}, is in force now."
        )


class BodyTooLarge(RequestRefused):
    """The body is larger than this gateway reads."""

    status = 413
    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is larger than {limit_bytes} bytes.")


class MediaTypeRefused(RequestRefused):
    """The body is of a kind that this route does not read."""

    status = 415
    code = "media_type_not_supported"
    param = "content-type"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"'Content-Type' must be one of: {allowed}.")


class HostRefused(RequestRefused):
    """The request was sent to a name that is not known as this gateway's."""

    status = 421
    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This gateway is not known as '{host[:100]}'. Ask it by address, or name it in "
            "PACELINE_ALLOWED_HOSTS."
        )


class EditUnconditional(RequestRefused):
    """An edit does not say which version it was made from."""

    status = 428
    code = "if_match_missing"
    message = (
        "An edit needs 'If-Match' with the ETag of the version that it was made from, so that it "
        "overwrites nobody else's."
    )
    param = "if-match"


class HeadTooLarge(RequestRefused):
    """The head of the request is larger than this gateway reads."""

    status = 431
    code = "headers_too_large"

    def __init__(self, limit_bytes: int, limit_headers: int) -> None:
        super().__init__(
            f"A request may have at most {limit_headers} headers of {limit_bytes} bytes in all."
        )


class Quarantined(RequestRefused):
    """Two workers were lost while they had this body."""

    status = 422
    code = "request_quarantined"
    message = (
        "Two workers broke off while they had this very request, so it is not sent again for some "
        "minutes. A shorter prompt or a smaller picture may be what it takes."
    )


class TokensOverLimit(RequestRefused):
    """The request may take more tokens than its key ever has at once: waiting would not help."""

    code = "tokens_over_limit"
    param = "max_tokens"

    def __init__(self, name: str, limit: int, tokens: int) -> None:
        super().__init__(
            f"This request may take {tokens} tokens, its prompt and 'max_tokens' together; the "
            f"limit of this key is {limit} ({name})."
        )


class LimitReached(RequestRefused):
    """A limit of the key is reached for now; the request has cost nothing."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, name: str, limit: int, wait_s: float) -> None:
        super().__init__(f"The limit of this key is reached: {limit} {name.replace('_', ' ')}.")
        self.code = f"{name}_exceeded"
        # Rounded up: who comes earlier than told comes in vain.
        self.retry_after_s = math.ceil(wait_s)


class RefusedByWorker(RequestRefused):
    """The worker refused the request and said why in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code or self.code

    @property
    def counted_as(self) -> str:
        """Name it as ours: a worker may call its refusals whatever it likes."""
        return "refused_by_worker"


def to_body(error: GatewayError) -> bytes:
    """Render an error in OpenAI's shape."""
    return to_json(error_body(error.message, kind=error.type, param=error.param, code=error.code))


def to_event(error: GatewayError) -> bytes:
    """Render an error as the last event of a stream; no `[DONE]` may follow it."""
    return b"data: " + to_body(error) + b"\n\n"


def to_headers(error: GatewayError) -> Headers:
    """List the headers that belong to an error, for a response of its own."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        # Whole seconds, never 0: a client that reads 0 comes back at once.
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if isinstance(error, KeyRefused):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodRefused):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        # The rest of the body is not read, so the connection cannot be used again.
        headers.append((b"connection", b"close"))
    return headers
