"""Error responses of a worker.

`as_request_error` translates errors of the engine (`workers.engine.types`) and of the parser
(`paceline.request.fields.FieldError`), so that no response contains the text of a library.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from paceline.protocol import CONTENT_CODINGS, TOKENS_HEADER, ApiError
from paceline.request.fields import FieldError
from workers.engine import types

log = logging.getLogger(__name__)


class RequestError(ApiError, code="generation_failed"):
    """A request that gets an error response instead of a completion; itself, a failure."""

    message = "The worker failed while it generated this completion."
    headers: Mapping[str, str] = MappingProxyType({})


class BadRequest(RequestError, status=400, kind="invalid_request_error", code="invalid_value"):
    """The request is invalid or not supported; `param` names the field."""


class UnknownModel(BadRequest, status=404, code="model_not_found"):
    """The request names a model that the worker does not serve."""

    def __init__(self, requested: str, served: str) -> None:
        super().__init__(
            f"This worker does not serve the model '{requested[:200]}', only '{served}'.",
            param="model",
        )


class ModelUnsuited(BadRequest, code="model_not_supported"):
    """The model of the worker does not serve the endpoint."""

    def __init__(self, served: str, endpoints: Sequence[str]) -> None:
        super().__init__(
            f"The model '{served}' does not serve this endpoint, but: {', '.join(endpoints)}.",
            param="model",
        )


class BodyTooLarge(BadRequest, status=413, code="body_too_large"):
    """The body exceeds the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.")


class CodingRefused(BadRequest, status=415, code="unsupported_content_encoding"):
    """The body has a coding that nothing here decodes, or several."""

    param = "content-encoding"
    headers = MappingProxyType({"accept-encoding": CONTENT_CODINGS})


class TokenLimitExceeded(BadRequest, code="tokens_over_limit"):
    """The request may need more tokens than the gateway has reserved for it."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"This request may need {tokens} tokens, more than its limit.")
        self.headers = {TOKENS_HEADER: str(tokens)}


class ClientLeft(BadRequest, status=499, code="client_left"):
    """The client closed the connection before the response was complete."""

    message = "The client closed the connection."


class ClientStalled(ClientLeft, code="client_stalled"):
    """The client stopped reading while other requests waited for its row of the batch."""

    message = "The client stopped reading."


class _HttpError(BadRequest):
    code = None

    def __init__(self, error: HTTPException) -> None:
        super().__init__(f"{HTTPStatus(error.status_code).phrase}.")
        self.status = error.status_code
        self.headers = error.headers or {}


class NotAuthorised(RequestError, status=401, kind="authentication_error", code="invalid_token"):
    """The join token is missing or wrong."""

    message = "Send the join token of this worker as a bearer token."
    headers = MappingProxyType({"www-authenticate": "Bearer"})


class WorkerDraining(RequestError, status=503, code="worker_draining"):
    """The worker is shutting down and accepts no new requests."""

    message = "This worker is shutting down."
    retry_after_s = 1


class PrefixRefused(RequestError, status=404, kind="invalid_request_error"):
    """The worker offers no nodes to another worker; `code` has the reason."""

    message = "This worker has no nodes of its prefix cache for the question."
    _statuses: Mapping[str, int] = MappingProxyType({"other_model": 409, "busy": 503})

    def __init__(self, reason: str) -> None:
        super().__init__(code=reason)
        self.status = self._statuses.get(reason, self.status)


class _EngineStopped(WorkerDraining, code="engine_stopped"):
    message = "The engine of this worker has stopped."


class MemoryShort(RequestError, status=503, kind="overloaded_error", code="memory_short"):
    """The memory of the machine is nearly full, and one more request could end the worker."""

    retry_after_s = 5

    def __init__(self, used_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            "The memory of this machine is nearly full: the worker uses "
            f"{used_bytes / 1e9:.1f} GB, of {limit_bytes / 1e9:.1f} GB that it may use."
        )


class _Busy(RequestError, status=429, kind="rate_limit_error", code="queue_full"):
    message = "The queue of this worker is full."

    def __init__(self, retry_after_s: float) -> None:
        super().__init__()
        self.retry_after_s = retry_after_s


class PictureMemoryFull(_Busy):
    """The decoded pictures of other requests take all the memory that is left for them."""

    message = "The pictures of other requests take the memory of this worker."

    def __init__(self) -> None:
        super().__init__(retry_after_s=1.0)


_TRANSLATIONS: Mapping[type[Exception], Callable[[Any], RequestError]] = {
    RequestError: lambda error: error,
    FieldError: lambda error: BadRequest(error.message, param=error.param),
    types.InvalidGeneration: lambda error: BadRequest(
        error.message, param=error.param, code=error.code
    ),
    types.TokenLimitExceeded: lambda error: TokenLimitExceeded(error.tokens),
    types.EngineBusy: lambda error: _Busy(error.retry_after_s),
    types.MemoryShort: lambda error: MemoryShort(error.used_bytes, error.limit_bytes),
    types.EngineStopped: lambda _: _EngineStopped(),
    HTTPException: _HttpError,
}


def as_request_error(error: Exception, request_id: str = "") -> RequestError:
    """Return the error for the client; log any error whose text the client must not see."""
    for kind, translate in _TRANSLATIONS.items():
        if isinstance(error, kind):
            return translate(error)
    log.error("request.failed request_id=%s", request_id, exc_info=error)
    return RequestError()


async def render(request: Request, error: Exception) -> JSONResponse:
    """Return the error response: OpenAI's error object, the status and Retry-After."""
    request_id = getattr(request.state, "request_id", "")
    translated = as_request_error(error, request_id)
    headers = dict(translated.headers)
    if request_id:
        headers["x-request-id"] = request_id
    if translated.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(translated.retry_after_s))
    return JSONResponse(translated.body(), translated.status, headers)
