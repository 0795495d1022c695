"""What can go wrong between a client and a worker, and the one place that renders it.

StartRefused                the gateway cannot start; one sentence for the person at the terminal
GatewayError                one request cannot be answered as asked
+-- RequestRefused          the request is at fault
|   +-- NotHttp             400  the bytes are no HTTP/1.1 request
|   +-- BodyNotJson         400  the body is no JSON object
|   +-- FieldInvalid        400  one field is wrong; `param` names it
|   +-- KeyRefused          401  no key, or not a known one
|   +-- NotAllowedHere      403  this route is not open to this caller
|   +-- PathUnknown         404  no such route
|   +-- ModelUnknown        404  neither the policy nor the fleet knows the model
|   +-- MethodRefused       405  the route exists, the method does not
|   +-- HeadTooSlow         408  the head did not arrive in time
|   +-- BodyTooSlow         408  the body did not arrive in time
|   +-- WorkerIdTaken       409  another live worker holds that id
|   +-- BodyTooLarge        413  counted while reading
|   +-- HostRefused         421  asked under a name that is not this gateway's
|   +-- HeadTooLarge        431  too many header bytes, or too many headers
|   +-- Quarantined         422  two workers were lost over this very body
|   +-- RefusedByWorker     4xx  the worker says why, in OpenAI's shape
+-- NoWorker                503  nobody can take it now
+-- QueueFull               503  too many wait for the same pool already
+-- QueueTimeout            503  no slot became free in the time that a request may wait
+-- Stopping                503  the gateway is ending
+-- Overloaded              503  this gateway has all it can carry
+-- RequestTooLong          504  the whole request took longer than any may take
+-- WorkerError             the worker is at fault
    +-- WorkerUnreachable   503  no connection, so nothing can have started
    +-- WorkerBusy          503  the worker asks to come back later
    +-- WorkerLost          502  the connection broke before the answer was complete
    +-- WorkerFailed        502  the worker says it failed, or answers nonsense
    +-- WorkerSilent        504  no answer began in time
    +-- WorkerStalled       504  the answer paused for too long
"""

from __future__ import annotations

from pydantic_core import to_json


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


class RequestRefused(GatewayError):
    """The request is at fault; sending it again changes nothing."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


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


class KeyRefused(RequestRefused):
    """No key came along, or one that is not known; the answer is the same for both."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    message = "A valid key is needed: 'Authorization: Bearer KEY'."


class NotAllowedHere(RequestRefused):
    """The route is closed to this caller."""

    status = 403
    type = "permission_error"
    code = "not_allowed"
    message = "Without PACELINE_ADMIN_KEY this route answers only on the gateway's own machine."


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


class BodyTooLarge(RequestRefused):
    """The body is larger than this gateway reads."""

    status = 413
    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is larger than {limit_bytes} bytes.")


class HostRefused(RequestRefused):
    """The request was sent to a name that is not known as this gateway's."""

    status = 421
    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This gateway is not known as '{host[:100]}'. Ask it by address, or name it in "
            "PACELINE_ALLOWED_HOSTS."
        )


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


class RefusedByWorker(RequestRefused):
    """The worker refused the request and said why in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code or self.code


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


def to_body(error: GatewayError) -> bytes:
    """Render an error in OpenAI's shape."""
    return to_json(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def to_event(error: GatewayError) -> bytes:
    """Render an error as the last event of a stream; no `[DONE]` may follow it."""
    return b"data: " + to_body(error) + b"\n\n"


def to_headers(error: GatewayError) -> list[tuple[bytes, bytes]]:
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
