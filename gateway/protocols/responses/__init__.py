"""OpenAI's Responses: a request becomes a chat, and the answer of the chat a response.

A wire format of its own for each request: its events are numbered, repeat the request, and an error
in the stream ends the response that has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gateway import errors
from gateway.protocols.base import choice_of, has_choices, object_in, renamed, renamed_places
from gateway.protocols.documents import NO_DOCUMENTS, AskedPdfs, Document, pdfs_in
from gateway.protocols.openai import CHAT, reading_of
from gateway.protocols.responses.items import known_fields, shown_item
from gateway.protocols.responses.request import (
    FIELDS,
    Chat,
    Item,
    Json,
    ResponsesRequest,
    check_items,
    check_metadata,
    read_items,
    read_request,
    to_chat,
)
from gateway.protocols.responses.response import (
    ResponseBuilder,
    ResponseEncoder,
    encode_event,
)
from gateway.protocols.sealing import Sealer
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.strict_json import encode_json
from gateway.types import NO_CALLER, Caller, Header, Headers, Inspected, LimitState
from policies.document import PolicyDocument
from policies.request.fields import FieldError, read_cache_salt
from policies.request.profile import Endpoint

__all__ = [
    "PATH",
    "SCHEMA",
    "Item",
    "Json",
    "ResponseBuilder",
    "ResponsesFormat",
    "ResponsesRequest",
    "Sealer",
    "check_metadata",
    "known_fields",
    "read_items",
    "shown_item",
]

PATH = "/v1/responses"
_REASONING = b"reasoning"

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["model", "input"],
    "additionalProperties": False,
    "properties": {
        **{name: {} for name in sorted(FIELDS)},
        "model": {"type": "string", "minLength": 1},
        "input": {"type": ["string", "array"]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
        "previous_response_id": {"type": ["string", "null"]},
        "store": {"type": ["boolean", "null"]},
        "stream": {"type": ["boolean", "null"]},
        "tools": {"type": ["array", "null"]},
    },
}
"""The JSON Schema of a body; `read_request` and `to_chat` check what it leaves open."""


class ResponsesFormat:
    """One request of `POST /v1/responses`, which any worker serves that serves chats.

    The last event of its stream is `final_event`, which comes once the response is kept.
    `response_id` begins with `resp_`; `now_s` returns seconds since 1970.
    """

    path = PATH
    endpoint = Endpoint.CHAT

    def __init__(self, response_id: str, sealer: Sealer, now_s: Callable[[], float]) -> None:
        self.response_id = response_id
        self.request: ResponsesRequest | None = None
        self._builder: ResponseBuilder | None = None
        self.history: Sequence[Item] = ()
        """The items of earlier responses, which stand before the input."""
        self._sealer = sealer
        self._scope = ""
        """The isolation scope of the request, to which its reasoning is bound."""
        self._now_s = now_s
        self._chat: Chat | None = None

    @staticmethod
    def check_items(items: Sequence[Item], where: str) -> None:
        """Check items that are to be kept; raise a `RequestRefused`."""
        try:
            check_items(items, where)
        except FieldError as error:
            raise errors.FieldInvalid(error.message, param=error.param) from None

    def read(self, body: Mapping[str, Any]) -> ResponsesRequest:
        """Read a body; raise a `RequestRefused`."""
        try:
            self.request = read_request(body)
        except FieldError as error:
            raise errors.FieldInvalid(error.message, param=error.param) from None
        return self.request

    def pdfs(self, body: Mapping[str, Any]) -> AskedPdfs:
        """Return the PDFs of the input and of what stands before it, and the model."""
        request = self.request or self.read(body)
        return AskedPdfs(request.body.get("model"), tuple(pdfs_in([*self.history, *request.items])))

    def inspect(
        self,
        body: Mapping[str, Any],
        policy: PolicyDocument,
        fleet: FleetView,
        documents: Mapping[str, Document] = NO_DOCUMENTS,
        caller: Caller = NO_CALLER,
    ) -> Inspected:
        """Translate a body into a chat, and inspect that; raise a `RequestRefused`."""
        request = self.request or self.read(body)
        if request.tools.left_out and policy.tools.hosted == "refuse":
            at, _, kind = request.tools.left_out[0].partition(":")
            raise errors.ToolUnserved(kind, param=f"{at}.type")
        try:
            salt = read_cache_salt(request.body)
            self._scope = policy.prefix.scope(caller.key, caller.team, salt)
            reading = reading_of(request.body.get("model"), policy, fleet, documents)
            request = request.after(self.history)
            chat = to_chat(request, self._unseal, self.history, reading)
        except FieldError as error:
            raise errors.FieldInvalid(error.message, param=error.param) from None
        if request.background:
            chat.body["stream"] = True  # so that its events can be followed
        try:
            inspected = CHAT.inspect_translated(chat.body, policy, fleet)
        except errors.FieldInvalid as error:
            raise renamed(error, chat.param) from None
        self._chat = chat
        profile = inspected.profile
        calls = tuple(map(chat.param, profile.call_fields))
        replaced = (*chat.replaced, *renamed_places(profile.replaced, chat.param))
        profile = profile._replace(ignored=request.ignored, replaced=replaced, call_fields=calls)
        self._builder = ResponseBuilder(
            request,
            self.response_id,
            inspected.asked_model,
            profile.sampling,
            seal=self._seal,
            now_s=self._now_s,
        )
        return inspected._replace(profile=profile)

    def is_complete(self, answer: Mapping[str, Any]) -> bool:
        """Return whether the answer of the chat is whole."""
        return has_choices(answer)

    def encode(self, request: RoutingRequest, answer: dict[str, Any], body: bytes) -> bytes:  # noqa: ARG002
        """Return the response of a whole answer."""
        builder = self.builder
        message = object_in(choice_of(answer), "message")
        for _ in (*builder.read(answer, message), *builder.close()):
            pass  # nobody follows its events
        return self.body()

    def encoder(
        self,
        request: RoutingRequest,  # noqa: ARG002
        late_headers: Sequence[Header] = (),  # noqa: ARG002 - a comment has them
    ) -> ResponseEncoder:
        """Return the encoder of a stream."""
        return ResponseEncoder(self.builder)

    def begin_events(self) -> bytes:
        """Return the first events of a response that waits in the background."""
        return b"".join(map(encode_event, self.builder.begin(queued=True)))

    def final_event(self) -> bytes:
        """Return the last event of a complete stream."""
        return encode_event(self.builder.final())

    def body(self) -> bytes:
        """Return the response as it is now."""
        return encode_json(self.builder.response)

    def response_headers(self, request_id: str) -> Headers:  # noqa: ARG002
        """Return no headers beside those of every response."""
        return []

    def limit_headers(self, states: Iterable[LimitState], unix_s: float) -> Headers:
        """Return what remains of a client's limits, in OpenAI's headers."""
        return CHAT.limit_headers(states, unix_s)

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the comment, and an event, since clients count no comments."""
        return self.builder.keep_alive(comment)

    def error_body(self, error: errors.GatewayError) -> bytes:
        """Return the body of an error response."""
        return errors.to_body(self.named(error))

    def error_event(self, error: errors.GatewayError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return b"".join(map(encode_event, self.builder.fail(self.named(error))))

    @property
    def builder(self) -> ResponseBuilder:
        """Return the response of a request that has been inspected."""
        assert self._builder is not None, "the request has not been inspected"
        return self._builder

    def named(self, error: errors.GatewayError) -> errors.GatewayError:
        """Return an error after the inspection that names fields as the client knows them."""
        return error if self._chat is None else renamed(error, self._chat.param)

    def drop(self) -> None:
        """Drop the request and the output, since what refers to this may stay for longer."""
        self.request, self.history, self._chat = None, (), None
        if self._builder is not None:
            self._builder.drop()

    def _seal(self, reasoning: str) -> str:
        return self._sealer.seal(reasoning.encode(), _REASONING, self._scope)

    def _unseal(self, sealed: str) -> str | None:
        text = self._sealer.unseal(sealed, _REASONING, self._scope)
        return None if text is None else text.decode()
