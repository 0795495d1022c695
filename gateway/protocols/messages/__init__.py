"""Anthropic's Messages: a request becomes a chat, and the answer of the chat a message.

https://docs.anthropic.com/en/api/messages. Fields that concern only Anthropic's own service, such
as `cache_control`, are accepted and omitted.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

from gateway import errors
from gateway.protocols.base import choice_of, object_in, object_schema
from gateway.protocols.messages.request import MessagesChat, is_own_block, to_chat
from gateway.protocols.messages.response import (
    MessageEncoder,
    content_of,
    message_of,
    metrics_of,
    stop_of,
)
from gateway.protocols.openai import InspectionContext
from gateway.protocols.translation import TranslatingFormat
from gateway.routing.select import RoutingRequest
from gateway.strict_json import encode_json, objects_of
from gateway.types import Header, Headers, Inspected, Json, LimitState
from paceline.request.wires import HONOURED, IGNORED, IGNORED_ON, NEUTRAL, Wire

MESSAGES_PATH = "/v1/messages"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERFLOW = re.compile(r"maximum context length is ([0-9]+) tokens.* resulted in ([0-9]+) tokens")
_REASONING = b"thinking "
_OWN_FIELDS = (HONOURED[Wire.MESSAGES] | IGNORED_ON[Wire.MESSAGES]).difference(
    HONOURED[Wire.CHAT], IGNORED, NEUTRAL
)
_OWN_CHOICES = ("auto", "any", "tool", "none")
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_ERROR = object_schema("type message", strict=False, type="string", message="string")
ERROR_SCHEMA = object_schema("type error", strict=False, type={"const": "error"}, error=_ERROR) | {
    "description": "Anthropic's shape."
}


class MessagesFormat(TranslatingFormat):
    """One request of `POST /v1/messages`."""

    _chat = MessagesChat({}, {})

    def _inspect(self, body: Mapping[str, Any], context: InspectionContext) -> Inspected:
        if body.get("thread") is not None:
            raise errors.ThreadUnserved
        self._scope = context.scope(body)
        chat = to_chat(body, self._is_ours, context.reading(body.get("model")))
        inspected = self._inspect_chat(chat, context)
        self._chat = chat
        return inspected

    def encode(self, request: RoutingRequest, answer: Json, body: bytes) -> bytes:
        """Return the message of a whole answer."""
        choice = choice_of(answer)
        content = [*content_of(choice, self._mark)]
        message = message_of(answer, content, self._chat.breakpoint_in)
        refusal = object_in(choice, "message").get("refusal")
        message |= stop_of(choice, refused=bool(refusal))
        return encode_json(message | metrics_of(answer, self._chat) | self._chat.edits)

    def encoder(
        self, request: RoutingRequest, late_headers: Sequence[Header] = ()
    ) -> MessageEncoder:
        """Return the encoder of a stream; a comment has the late headers."""
        return MessageEncoder(self._mark, self._chat)

    @property
    def _mark(self) -> Callable[[str], str] | None:
        """Return the signer of the client's reasoning; None if it asks for none."""
        return self._sign if self._chat.shows_reasoning else None

    def _sign(self, reasoning: str) -> str:
        """Return the mark that later shows that reasoning is ours and unchanged."""
        return self._sealer.seal(b"", _REASONING + reasoning.encode(), self._scope)

    def _is_ours(self, reasoning: str, signature: str) -> bool:
        purpose = _REASONING + reasoning.encode()
        return self._sealer.unseal(signature, purpose, self._scope) is not None

    def response_headers(self, request_id: str) -> Headers:
        """Return the request id under Anthropic's name."""
        return [(b"request-id", request_id.encode())]

    def limit_headers(self, states: Iterable[LimitState], unix_s: float) -> Headers:
        """Return the rest of a client's limits, in Anthropic's headers."""
        headers: Headers = []
        for unit, limit, remaining, full_in_s in states:
            prefix = f"anthropic-ratelimit-{unit}-".encode()
            full_at = datetime.fromtimestamp(unix_s + math.ceil(full_in_s), UTC)
            headers += [
                (prefix + b"limit", b"%d" % limit),
                (prefix + b"remaining", b"%d" % remaining),
                (prefix + b"reset", full_at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()),
            ]
        return headers

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the comment, and the event that Anthropic's clients expect in a pause."""
        return comment + _PING

    def error_body(self, error: errors.GatewayError) -> bytes:
        """Return the body of an error response in Anthropic's shape."""
        return error_body(self.named(error))

    def error_event(self, error: errors.GatewayError) -> bytes:
        """Return the last event of a stream that an error ends."""
        return b"event: error\ndata: " + self.error_body(error) + b"\n\n"


def is_messages(body: Mapping[str, Any]) -> bool:
    """Return whether a body has fields of a message's request that a chat's lacks."""
    choice = body.get("tool_choice")
    return (
        not _OWN_FIELDS.isdisjoint(body)
        or (isinstance(choice, dict) and choice.get("type") in _OWN_CHOICES)
        or any("name" in tool and "function" not in tool for tool in objects_of(body.get("tools")))
        or any(
            is_own_block(block.get("type")) or isinstance(block.get("source"), dict)
            for message in objects_of(body.get("messages"))
            for block in objects_of(message.get("content"))
        )
    )


def error_body(error: errors.GatewayError) -> bytes:
    """Return the body of an error response in Anthropic's shape."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ERROR_TYPES.get(error.status, other)
    message = error.message
    if error.param and error.param.casefold() not in message.casefold():
        message = f"{error.param}: {message}"  # the shape has no other place for it
    if error.code == errors.CONTEXT_OVERFLOW:
        # In the words by which Claude Code knows that it must shorten a conversation.
        message = "prompt is too long: it exceeds the context of the model"
        if counts := _OVERFLOW.search(error.message):
            message = f"prompt is too long: {counts[2]} tokens > {counts[1]} maximum"
    shown: Json = {"type": kind, "message": message}
    if isinstance(error, errors.ThreadUnserved | errors.EndpointUnserved):
        shown["details"] = {"error_code": error.code}
    return to_json({"type": "error", "error": shown})
