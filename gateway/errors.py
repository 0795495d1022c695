"""The errors of a gateway as one tree of classes, and the one place that renders them.

`paceline.http` sends three more before there is a request: `NotHttp` 400, `HeadTooSlow` 408 and
`HeadTooLarge` 431.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic_core import to_json

from gateway.types import Headers
from paceline.protocol import CONTENT_CODINGS, PAIRING_ENDED, ApiError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@\[\]-]{0,99}")
_PLAIN_CODE = re.compile(r"[a-z_]{1,64}")


def is_plain_name(text: str) -> bool:
    """Return whether a text is a name by its characters, and so no sentence of a prompt."""
    return _PLAIN_NAME.fullmatch(text) is not None


class StartupError(Exception):
    """A reason not to start; the message is one sentence that names the necessary change."""


class GatewayError(ApiError):
    """A request that cannot be answered as the client expects; the message is for the client."""

    code: str = "internal_error"
    message = "The gateway failed to process this request."
    public_message = ""
    """Replaces in the list of errors a message that can hold text of a prompt."""

    @property
    def counted_as(self) -> str:
        """Return the label for metrics: one of a fixed set."""
        return self.code

    @property
    def reason(self) -> str:
        """Return the message for the list of errors, which holds no text of a prompt."""
        return self.public_message or self.message


class RequestRefused(
    GatewayError, status=400, kind="invalid_request_error", code="invalid_request"
):
    """The request is at fault; a retry fails too."""


class BodyNotJson(RequestRefused, code="invalid_json"):
    """The body is not one strict JSON object."""

    message = "The body must be a JSON object in UTF-8."


class FieldInvalid(RequestRefused, code="invalid_value"):
    """One field of the body is missing, wrong or unknown."""

    @property
    def reason(self) -> str:
        """Return the message, if the name of the field can be no text of a prompt."""
        named = self.param is None or is_plain_name(self.param)
        return self.message if named else "The body has an unknown field."


class NoteMissing(FieldInvalid):
    """An edit of the policy gives no reason."""

    message = "An edit requires a note in 'x-paceline-note'."
    param = "x-paceline-note"


class PreviousUnknown(FieldInvalid, code="previous_response_not_found"):
    """The response or conversation that the request continues is not stored for this key.

    Not 404, which proxies take for a missing model.
    """

    public_message = "The response or conversation that the request continues is not stored."

    def __init__(self, kind: str, name: str, *, param: str) -> None:
        super().__init__(f"{kind} with id '{name[:100]}' not found.", param=param)


class PolicyRefused(RequestRefused, code="invalid_policy"):
    """The document is not a valid policy; the message names every problem."""

    def __init__(self, problems: str, *, param: str | None) -> None:
        super().__init__(f"The policy is invalid: {problems}.", param=param)


class TokensOverLimit(RequestRefused, code="tokens_over_limit"):
    """The request may use more tokens than the key may ever use at once, so a retry fails too."""

    param = "max_tokens"

    def __init__(self, name: str, limit: int, tokens: int) -> None:
        super().__init__(
            f"The prompt and 'max_tokens' of this request may use {tokens} tokens together; the "
            f"limit of this API key is {limit} ({name})."
        )


class ToolUnserved(RequestRefused, code="unsupported_value"):
    """A tool runs only on the servers of OpenAI or Anthropic."""

    def __init__(self, kind: str, *, param: str) -> None:
        super().__init__(f"No worker runs the tool '{kind[:100]}'.", param=param)


class ThreadUnserved(RequestRefused, code="thread_unsupported_request"):
    """A request of Anthropic's Messages starts a thread, which its server would keep.

    By this code the anthropic package sends the whole conversation instead.
    """

    message = "thread: This gateway does not store threads. Send the whole conversation."
    param = "thread"


class EndpointUnserved(RequestRefused, code="endpoint_not_served"):
    """A route below `/v1/` or `/v2/`, such as one of OpenAI, that this gateway does not serve.

    Not 404: proxies in front take that for a model that is gone, and send it nothing for a while.
    """

    message = "This gateway does not serve this endpoint. GET /openapi.json lists all endpoints."


class FeatureUntaken(RequestRefused, code="unsupported_value"):
    """No worker of the model supports a requested feature."""

    def __init__(self, model: str, feature: str, *, param: str | None) -> None:
        super().__init__(f"No worker of the model '{model[:100]}' supports {feature}.", param=param)
        self.public_message = f"No worker of the model supports {feature}."


class ModelUnsuited(RequestRefused, code="model_not_supported"):
    """The model does not serve the endpoint.

    Not 404: the model exists, and proxies in front would send it nothing for a while.
    """

    param = "model"

    def __init__(self, model: str, endpoint: str, served: Iterable[str]) -> None:
        others = ", ".join(sorted(served))
        super().__init__(f"The model '{model[:100]}' does not serve {endpoint}, only {others}.")


class KeyRefused(RequestRefused, status=401, kind="authentication_error", code="invalid_api_key"):
    """The API key is missing or unknown; the response does not say which."""

    message = "A valid API key is required: 'Authorization: Bearer KEY'."


class AdminKeyRefused(KeyRefused):
    """The admin key is missing or wrong."""

    message = (
        "A valid admin key is required: 'Authorization: Bearer KEY'. The gateway reads it from "
        "PACELINE_ADMIN_KEY, or else from 'admin-key' in its state folder."
    )


class EndedKeyRefused(KeyRefused):
    """The API key was revoked or replaced, or has expired."""

    counted_as = "ended_api_key"

    def __init__(self, key: str, how: str, at: datetime) -> None:
        ended = f"{'' if how == 'expired' else 'was '}{how} on {at.astimezone(UTC):%Y-%m-%d %H:%M}"
        super().__init__(f"This API key {ended} UTC. Ask the admin of this gateway for a new one.")
        self.public_message = f"A key that {ended} UTC is still in use."
        self.key = key


class KeyEnded(KeyRefused, code="key_revoked"):
    """The key was revoked, or expired, while the request ran."""

    message = "The API key of this request was revoked or has expired."


class PairingEnded(KeyRefused, code=PAIRING_ENDED):
    """The pairing of the worker has ended, or its token is of another id."""

    message = "The pairing of this worker has ended. Pair it again with `paceline join`."


class NotAllowedHere(RequestRefused, status=403, kind="permission_error", code="permission_denied"):
    """The route is closed to this client."""


class PairingRefused(NotAllowedHere, code="pairing_refused"):
    """No pairing code is valid for this worker; the message says why."""


class PageRefused(NotAllowedHere):
    """A web page of another site, while no key is needed."""

    message = (
        "While no API key is required, web pages of other sites may not use this gateway. Create a "
        "key with `paceline keys create` and send it."
    )


class PoolsNotAllowed(NotAllowedHere, code="pool_not_allowed"):
    """The key may not use any pool on the request's route."""

    message = "This API key may not use any of the pools on this request's route."


class NotFound(RequestRefused, status=404):
    """The request names something that does not exist."""


class PathUnknown(NotFound, code="path_not_found"):
    """The path does not exist, perhaps because the base URL is wrong."""

    message = "This path does not exist."

    def __init__(self, meant: str = "", advice: str = "") -> None:
        super().__init__(f"{self.message} {meant} does: {advice}." if meant else None)
        self.meant = meant


class ModelUnknown(NotFound, code="model_not_found"):
    """Neither the policy nor a worker has the model."""

    param = "model"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model '{model[:100]}' does not exist. GET /v1/models lists the models."
        )
        if not is_plain_name(model):
            self.public_message = "The requested model does not exist."


class KeyUnknown(NotFound, code="key_not_found"):
    """No key has the id."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The key '{name[:100]}' does not exist.")


class WorkerUnknown(NotFound, code="worker_not_found"):
    """No worker with the id has joined."""

    message = "No worker with this id has joined."


class EngineUnknown(NotFound, code="engine_not_found"):
    """No engine with the id was joined."""

    message = "No engine with this id has joined."


class CacheNotCleared(GatewayError, status=502, code="cache_not_cleared"):
    """A worker has not emptied its prefix cache."""

    message = "The worker did not clear its prefix cache. Try again once it is ready."


class VersionUnknown(NotFound, code="version_not_found"):
    """The policy lacks a version with the number."""

    param = "version"

    def __init__(self, number: int | str) -> None:
        super().__init__(f"The policy has no version '{str(number)[:100]}'.")


class ResponseUnknown(NotFound, code="response_not_found"):
    """No kept response, conversation or item has the id."""

    public_message = "No stored response, conversation or item has this id."

    def __init__(self, kind: str, name: str, *, param: str | None = None) -> None:
        super().__init__(f"{kind} with id '{name[:100]}' not found.", param=param)


class MethodRefused(RequestRefused, status=405, code="method_not_allowed"):
    """The path does not support the method."""

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This path supports {allowed} only.")
        self.allowed = allowed


class BodyTooSlow(RequestRefused, status=408, code="body_timeout"):
    """The body did not arrive in time."""

    message = "The body did not arrive in time."


class WorkerIdTaken(RequestRefused, status=409, code="worker_id_taken"):
    """Another live worker, with another address, has the id."""

    message = "Another live worker has this id. Start this worker with another id."


class EngineListed(RequestRefused, status=409, code="engine_in_settings"):
    """An engine of the settings cannot be changed at run time."""

    message = "The gateway's paceline.yaml lists this engine: change the file, and restart."


class WorkerUnconfirmed(RequestRefused, status=422, code="worker_unconfirmed"):
    """The URL of a heartbeat does not answer as the worker that sent it; the message says why."""

    param = "url"


class KeyIsRevoked(RequestRefused, status=409, code="key_is_revoked"):
    """A revoked key cannot be changed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The key '{name[:100]}' has been revoked permanently. Create a new one.")


class VersionConflict(RequestRefused, status=412, code="version_conflict"):
    """Another edit of the policy came first."""

    param = "if-match"

    def __init__(self, number: int, author: str) -> None:
        super().__init__(f"The policy has changed: version {number} by {author} is now active.")


class BodyTooLarge(RequestRefused, status=413, code="body_too_large"):
    """The body is larger than the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is larger than {limit_bytes} bytes.")


class MediaTypeRefused(RequestRefused, status=415, code="unsupported_media_type"):
    """The route does not support the media type of the body."""

    param = "content-type"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"'Content-Type' must be one of: {allowed}.")


class CodingRefused(RequestRefused, status=415, code="unsupported_content_encoding"):
    """The body has a coding that nothing here decodes, or several."""

    param = "content-encoding"


class HostRefused(RequestRefused, status=421, code="host_not_allowed"):
    """The request names another host than this gateway."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This gateway does not accept the host name '{host[:100]}'. Use its IP address, or "
            "add the name to PACELINE_ALLOWED_HOSTS."
        )


class Quarantined(RequestRefused, status=422, code="request_quarantined"):
    """Two workers crashed while processing this body."""

    message = (
        "Two workers crashed on this request body, so the gateway blocks it for 10 minutes. A "
        "shorter prompt or a smaller image may help."
    )


class EditUnconditional(RequestRefused, status=428, code="precondition_required"):
    """An edit of the policy lacks `If-Match`."""

    message = (
        "An edit requires 'If-Match' with the ETag of the edited version, so that it does not "
        "overwrite another edit."
    )
    param = "if-match"


class LimitReached(RequestRefused, status=429, kind="rate_limit_error"):
    """A rate limit of the key is reached; the request costs nothing."""

    def __init__(self, name: str, limit: int, wait_s: float) -> None:
        super().__init__(
            f"The rate limit of this API key is reached: {limit} {name.replace('_', ' ')}."
        )
        self.code = f"{name}_exceeded"
        # Rounded up: an earlier retry would fail.
        self.retry_after_s = math.ceil(wait_s)


CONTEXT_OVERFLOW = "context_length_exceeded"
"""The code of a prompt that exceeds the context, by OpenAI's name."""
CONSTRAINT_TOO_COSTLY = "constraint_too_costly"
"""The code of an answer that a worker has begun, and ends for a fault of the request."""


class RefusedByWorker(RequestRefused):
    """The worker rejects the request in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, param: str | None, code: str | None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        shown = f" ({self.code})" if _PLAIN_CODE.fullmatch(self.code or "") else ""
        self.public_message = f"The worker rejects the request{shown}."

    @property
    def counted_as(self) -> str:
        """Return one label for all codes of workers."""
        return "refused_by_worker"


class RefusedInAnswer(RefusedByWorker):
    """The worker ends an answer that it has begun, for a fault of the request: it has a cost."""


class Unavailable(GatewayError, status=503, kind="overloaded_error"):
    """The request cannot be served now; a later retry may succeed."""

    retry_after_s = 2.0

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class NoWorker(Unavailable, code="no_worker"):
    """No worker in the pools of the route can take the request now."""

    # Another message may name the model as the client wrote it.
    message = public_message = "No worker is available for this request."


class QueueFull(Unavailable, code="queue_full"):
    """The queue of the pool is full."""

    message = "All slots are in use and the queue is full. Try again later."


class QueueTimeout(QueueFull, status=504, code="queue_timeout"):
    """No slot became free within the queue timeout.

    Not 503: a proxy sends that to another gateway, where the request would wait again.
    """

    message = "No slot became free within the queue timeout. Try again later."


class ShuttingDown(Unavailable, code="shutting_down"):
    """The gateway is shutting down: it rejects new requests and cancels the last ones."""

    message = "The gateway is shutting down."


class Interrupted(ShuttingDown, status=502):
    """The gateway shut down after a worker may have begun the request.

    Not 503: a proxy sends that to another gateway, so that two workers would run the request.
    """


class Overloaded(Unavailable, code="gateway_overloaded"):
    """The gateway is at its limit of requests or memory; running requests come first."""

    message = "The gateway is overloaded. Try again in a moment."
    retry_after_s = 1.0


class TooManyViewers(Unavailable, code="too_many_viewers"):
    """The limit of status streams is reached."""

    message = "Too many clients are streaming the status already. Use GET /v1/status instead."
    retry_after_s = 10.0


class TooManyWorkers(Unavailable, code="too_many_workers"):
    """The limit of live workers is reached."""

    message = "This gateway accepts no more workers. Stop one before you start another."
    retry_after_s = 10.0


class RecordsUnwritable(Unavailable, kind="server_error", code="state_unavailable"):
    """The stored state cannot be read or written."""

    message = "The gateway cannot read or write its state now. Try again later."


class WriteUnconfirmed(RecordsUnwritable, code="write_unconfirmed"):
    """A write was not confirmed in time, and may be stored."""

    message = (
        "The change was not confirmed in time and may or may not be stored. Check before you try "
        "again; if the policy was stored, the same If-Match returns 412."
    )


class RevocationUnstored(RecordsUnwritable, code="revocation_unstored"):
    """A key is revoked at this gateway, but the revocation is not stored."""

    message = (
        "This gateway now refuses the key, but could not store the revocation yet. It will do so "
        "as soon as it can; only then will other gateways refuse the key too."
    )


class RequestTooLong(GatewayError, status=504, kind="timeout_error", code="request_timeout"):
    """The request, from its body to its last byte, took longer than the request timeout."""

    message = "The response was not complete within the request timeout."


class AnswerTooLarge(GatewayError, status=502, code="response_too_large"):
    """An answer, or an event of it, is larger than the gateway keeps; no worker is at fault."""

    message = "The response, or one event of it, is too large. Ask for fewer log probabilities."


class ResponseTooLarge(AnswerTooLarge):
    """A response in the background is larger than the gateway keeps."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The events of the response are larger than {limit_bytes} bytes, the maximum that "
            "this gateway stores. Stream it without 'background', or lower 'max_output_tokens'."
        )


class WorkerError(GatewayError, status=502, code="worker_error"):
    """The worker is at fault; the log has the details."""


class WorkerUnreachable(Unavailable, WorkerError, code="worker_unreachable"):
    """No connection could be made, so the request cannot have started."""

    message = "The gateway cannot reach the worker."


class WorkerBusy(Unavailable, WorkerError, code="workers_busy"):
    """The worker rejects the request and asks for a later retry."""

    message = "All workers for this request are busy. Try again later."


class WorkerLost(WorkerError, code="worker_lost"):
    """The connection to the worker broke before the response was complete."""

    message = "The connection to the worker was lost before the response was complete."


class WorkerMoved(WorkerLost):
    """The gateway ended the attempt, because an admin drains the worker."""


class WorkerFailed(WorkerError, code="worker_failed"):
    """The worker reports a failure, or sends an invalid response."""

    message = "The worker failed to process this request."


class FieldUnheld(WorkerError, status=400, kind="invalid_request_error", code="unsupported_value"):
    """The engine takes a field and ignores it; a worker of another kind may hold to it."""

    def __init__(self, param: str) -> None:
        super().__init__(f"The engine did not follow '{param}'.", param=param)


class WorkerSilent(WorkerError, status=504, kind="timeout_error", code="worker_timeout"):
    """The worker sent nothing in time."""

    message = "The worker did not respond in time."


class WorkerStalled(WorkerSilent, code="worker_stalled"):
    """The response began, and then paused for too long."""

    message = "The worker's response stalled."


def to_body(error: GatewayError) -> bytes:
    """Render an error in OpenAI's shape."""
    return to_json(error.body())


def to_event(error: GatewayError) -> bytes:
    """Render an error as the last event of a stream; no `[DONE]` may follow."""
    return b"data: " + to_body(error) + b"\n\n"


def to_headers(error: GatewayError) -> Headers:
    """Return the headers of an error response."""
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        # Whole seconds, never 0: a client that reads 0 comes back at once.
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if isinstance(error, KeyRefused):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, AnswerTooLarge):
        # The packages of OpenAI and Anthropic repeat a request that ends with 502, and it costs.
        headers.append((b"x-should-retry", b"false"))
    if isinstance(error, MethodRefused):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, CodingRefused):
        headers.append((b"accept-encoding", CONTENT_CODINGS.encode()))
    if isinstance(error, BodyTooLarge | BodyTooSlow | CodingRefused):
        # The rest of the body is not read, so the connection cannot be reused.
        headers.append((b"connection", b"close"))
    return headers
