"""Why a request is refused: the branch of `errors.py` where the request is at fault."""

from __future__ import annotations

import math

from gateway.errors import RequestRefused


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


class EditOvertaken(RequestRefused):
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
