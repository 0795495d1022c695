"""What a worker answers instead of a completion, and the one place that renders it.

Refused                  any request that gets no completion; carries status and OpenAI's fields
+-- BadRequest           400, names the field
+-- NotAuthorised        401
+-- UnknownModel         404
+-- BodyTooLarge         413
+-- WorkerDraining       503 with Retry-After
+-- ClientLeft           499, nobody reads it
+-- ClientStalled        499, stopped reading in the middle of a stream

Errors of the engine (`workers.engine.types`) and of the reading of fields
(`policies.request.fields.FieldError`) are translated into `Refused` here, so that a client never
sees the text of a library.
"""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from policies.request.fields import FieldError
from workers.engine.types import EngineBusy, EngineStopped, InvalidGeneration
from workers.protocol import error_body
from workers.server.ports import Json

log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that gets no completion."""

    status = 500
    kind = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers: dict[str, str] = {}

    def body(self) -> Json:
        """Render OpenAI's error object."""
        return error_body(self.message, kind=self.kind, param=self.param, code=self.code)


class BadRequest(Refused):
    """The request can never be answered as it is; `param` names the field."""

    status = 400
    kind = "invalid_request_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = "invalid_value"
    ) -> None:
        super().__init__(message, param=param)
        self.code = code


class NotAuthorised(Refused):
    """The join token is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_token"

    def __init__(self) -> None:
        super().__init__("This worker needs the join token as a Bearer token.")
        self.headers = {"www-authenticate": "Bearer"}


class UnknownModel(Refused):
    """Another model than the served one was named."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(
            f"The model '{asked[:200]}' is not served here; '{served}' is.", param="model"
        )


class BodyTooLarge(Refused):
    """The body is larger than the worker reads."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


class WorkerDraining(Refused):
    """The worker finishes what it has and takes nothing new."""

    status = 503
    kind = "server_error"
    code = "worker_draining"

    def __init__(self) -> None:
        super().__init__("This worker is shutting down.", retry_after_s=1)


class ClientLeft(Refused):
    """The client closed the connection before its answer was ready."""

    status = 499
    kind = "invalid_request_error"
    code = "client_left"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


class ClientStalled(Refused):
    """The client stopped reading, and held a row that others wait for."""

    status = 499
    kind = "invalid_request_error"
    code = "client_stalled"

    def __init__(self) -> None:
        super().__init__("The client stopped reading.")


class _OutOfService(Refused):
    status = 503
    code = "engine_stopped"


class _Busy(Refused):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class _Failed(Refused):
    code = "generation_failed"


class _HttpRefusal(Refused):
    kind = "invalid_request_error"
    code = None

    def __init__(self, error: HTTPException) -> None:
        super().__init__(f"{HTTPStatus(error.status_code).phrase}.")
        self.status = error.status_code
        self.headers = dict(error.headers or {})


def as_refusal(error: Exception, request_id: str = "") -> Refused:
    """Translate any error into what the client is told; log what it is not told."""
    refusal: Refused
    match error:
        case Refused():
            refusal = error
        case FieldError():
            refusal = BadRequest(error.message, param=error.param)
        case InvalidGeneration():
            refusal = BadRequest(error.message, param=error.param, code=error.code)
        case EngineBusy():
            refusal = _Busy("Too many requests are waiting.", retry_after_s=error.retry_after_s)
        case EngineStopped():
            refusal = _OutOfService("The engine of this worker has stopped.", retry_after_s=1)
        case HTTPException():
            refusal = _HttpRefusal(error)
        case _:
            log.error("answer.failed request_id=%s", request_id, exc_info=error)
            refusal = _Failed("The worker failed while it made this answer.")
    return refusal


async def render(request: Request, error: Exception) -> JSONResponse:
    """Answer with OpenAI's error object, the right status and Retry-After."""
    request_id = getattr(request.state, "request_id", "")
    refusal = as_refusal(error, request_id)
    headers = dict(refusal.headers)
    if request_id:
        headers["x-request-id"] = request_id
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    return JSONResponse(refusal.body(), refusal.status, headers)
