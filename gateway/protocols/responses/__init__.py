"""OpenAI's Responses: a request becomes a chat, and the answer of the chat a response.

A wire format of its own for each request: its events are numbered, repeat the request, and an error
in the stream ends the response that has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway import errors
from gateway.protocols.base import choice_of, object_in
from gateway.protocols.documents import NO_DOCUMENTS, AskedPdfs, Document, pdfs_in
from gateway.protocols.openai import TranslatingFormat, reading_of
from gateway.protocols.responses.request import (
    FIELDS,
    Item,
    ResponsesRequest,
    read_request,
    to_chat,
)
from gateway.protocols.responses.response import ResponseBuilder, ResponseEncoder, encode_event
from gateway.protocols.sealing import Sealer
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.strict_json import encode_json
from gateway.types import NO_CALLER, Caller, Header, Inspected
from paceline.request.fields import FieldError, read_cache_salt
from policies.document import PolicyDocument

RESPONSES_PATH = "/v1/responses"
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


class ResponsesFormat(TranslatingFormat):
    """One request of `POST /v1/responses`.

    The last event of its stream is `final_event`, which comes once the response is kept.
    `response_id` begins with `resp_`; `now_s` returns seconds since 1970.
    """

    def __init__(self, response_id: str, sealer: Sealer, now_s: Callable[[], float]) -> None:
        super().__init__(sealer)
        self.response_id = response_id
        self.request: ResponsesRequest | None = None
        self._builder: ResponseBuilder | None = None
        self.history: Sequence[Item] = ()
        """The items of earlier responses, which stand before the input."""
        self._now_s = now_s

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
        self._refuse_hosted(request.tools.left_out, policy)
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
        inspected = self._inspect_chat(
            chat.body, policy, fleet, chat.param, replaced=chat.replaced, ignored=request.ignored
        )
        self._builder = ResponseBuilder(
            request,
            self.response_id,
            inspected.asked_model,
            inspected.profile.sampling,
            seal=self._seal,
            now_s=self._now_s,
        )
        return inspected

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

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the comment, and an event, since clients count no comments."""
        return self.builder.keep_alive(comment)

    def error_event(self, error: errors.GatewayError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return b"".join(map(encode_event, self.builder.fail(self.named(error))))

    @property
    def builder(self) -> ResponseBuilder:
        """Return the response of a request that has been inspected."""
        assert self._builder is not None, "the request has not been inspected"
        return self._builder

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
