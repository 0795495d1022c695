"""The one place that renders errors: as a body, as the last event of a stream, as headers."""

from __future__ import annotations

from pydantic_core import to_json

from gateway.errors import GatewayError
from gateway.refusals import BodyTooLarge, BodyTooSlow, KeyRefused, MethodRefused
from gateway.types import Headers


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
