"""OpenAI's Responses: a request becomes a chat, and the answer of the chat a response.

A wire format of its own for each request: its events are numbered, repeat the request, and an error
in the stream ends the response that has begun.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway import errors
from gateway.protocols.base import choice_of, encode_events, object_in
from gateway.protocols.documents import pdfs_in
from gateway.protocols.openai import InspectionContext
from gateway.protocols.responses.request import (
    Item,
    ResponsesRequest,
    read_request,
    to_chat,
)
from gateway.protocols.responses.response import ResponseBuilder
from gateway.protocols.sealing import Sealer
from gateway.protocols.translation import TranslatingFormat
from gateway.routing.select import RoutingRequest
from gateway.strict_json import encode_json
from gateway.types import Header, Inspected, Json
from paceline.request.fields import FieldError

RESPONSES_PATH = "/v1/responses"
DONE = b"data: [DONE]\n\n"
"""The end of a stream in Open Responses; OpenAI's lacks it, but its clients accept it."""
_REASONING = b"reasoning"


class ResponsesFormat(TranslatingFormat):
    """One request of `POST /v1/responses`.

    The last event of its stream is the builder's `final`, which comes once the response is kept.
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

    def pdfs(self, body: Mapping[str, Any]) -> tuple[object, tuple[str, ...]]:
        """Return the name of the model, and each PDF of the input and of its history."""
        request = self.request or self.read(body)
        return request.body.get("model"), tuple(pdfs_in([*self.history, *request.items]))

    def _inspect(self, body: Mapping[str, Any], context: InspectionContext) -> Inspected:
        request = self.request or self.read(body)
        self._scope = context.scope(request.body)
        request = request.after(self.history)
        reading = context.reading(request.body.get("model"))
        chat = to_chat(request, self._unseal, self.history, reading)
        if request.background:
            chat.body["stream"] = True  # so that its events can be followed
        inspected = self._inspect_chat(chat, context)
        self._builder = ResponseBuilder(
            request, self.response_id, inspected, seal=self._seal, now_s=self._now_s
        )
        return inspected

    def encode(self, request: RoutingRequest, answer: Json, body: bytes) -> bytes:
        """Return the response of a whole answer."""
        builder = self.builder
        message = object_in(choice_of(answer), "message")
        for _ in (*builder.read(answer, message), *builder.close()):
            pass  # nobody follows its events
        return self.body()

    def encoder(
        self, request: RoutingRequest, late_headers: Sequence[Header] = ()
    ) -> ResponseBuilder:
        """Return the encoder of a stream; a comment has the late headers."""
        return self.builder

    def body(self) -> bytes:
        """Return the response as it is now."""
        return encode_json(self.builder.response)

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the comment, and an event, since clients count no comments."""
        return self.builder.keep_alive(comment)

    def error_event(self, error: errors.GatewayError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return encode_events(self.builder.fail(self.named(error))) + DONE

    @property
    def builder(self) -> ResponseBuilder:
        """Return the response of a request that has been inspected."""
        assert self._builder is not None, "the request has not been inspected"
        return self._builder

    def drop(self) -> None:
        """Drop the request and the output, since references to this may live longer."""
        self.request, self.history, self._param = None, (), str
        if self._builder is not None:
            self._builder.drop()

    def _seal(self, reasoning: str) -> str:
        return self._sealer.seal(reasoning.encode(), _REASONING, self._scope)

    def _unseal(self, sealed: str) -> str | None:
        text = self._sealer.unseal(sealed, _REASONING, self._scope)
        return None if text is None else text.decode()
