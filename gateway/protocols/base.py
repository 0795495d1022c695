"""The interface of a wire format: client request to engine request, engine response to bytes.

Workers are called in the format of an OpenAI server. A wire format reads the body of a client into
such a request, and encodes the response, whole or as a stream of events, and every error. Its
stream may have other events than the engine's: a `StreamEncoder` turns each event of the engine
into zero or more events of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gateway.errors import GatewayError
from gateway.protocols.documents import NO_DOCUMENTS, AskedPdfs, Document
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.types import NO_CALLER, Caller, Header, Headers, Inspected, LimitState
from policies.document import PolicyDocument
from policies.request.profile import Endpoint


class AnswerMalformed(ValueError):
    """An engine's answer has values of other types than a format translates."""


def object_in(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object in a field of an engine's answer, empty if there is none."""
    value = answer.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):  # faster than `Mapping`, and a parsed answer has no other
        raise AnswerMalformed(name)
    return value


def objects_in(answer: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """Return the list of objects in a field of an engine's answer, empty if there is none."""
    values = answer.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise AnswerMalformed(name)
    return values


def choice_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first choice of an engine's answer or chunk, empty if there is none."""
    choices = objects_in(answer, "choices")
    return choices[0] if choices else {}


def text_in(answer: Mapping[str, Any], name: str) -> str:
    """Return the text in a field of an engine's answer, empty if there is none."""
    value = answer.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AnswerMalformed(name)
    return value


def has_choices(answer: Mapping[str, Any]) -> bool:
    """Return whether an engine's answer to a chat or a completion is whole."""
    return bool(answer.get("choices"))


def renamed(error: GatewayError, own_name: Callable[[str], str]) -> GatewayError:
    """Return an error that names a field as its client knows it, in the message too."""
    if error.param is None or (param := own_name(error.param)) == error.param:
        return error
    pairs = zip(
        (error.param, error.param.rpartition(".")[2]),
        (param, param.rpartition(".")[2]),
        strict=True,
    )
    for chat_name, name in pairs:
        error.message = error.message.replace(f"'{chat_name}'", f"'{name}'")
    if param not in error.message:
        error.message = f"{param}: {error.message}"
    error.param = param
    return error


def renamed_places(places: Iterable[str], own_name: Callable[[str], str]) -> Iterator[str]:
    """Yield places with types behind them, as their client knows the places."""
    for one in places:
        place, _, kind = one.rpartition(":")
        yield f"{own_name(place)}:{kind}"


class StreamEncoder(Protocol):
    """Encodes one stream of events for a client."""

    failovers: int
    """How often the stream has gone on at another worker."""

    @property
    def passthrough(self) -> bool:
        """Whether text events pass unchanged, so that they need not be parsed."""

    def event(self, event: bytes, frame: dict[str, Any]) -> bytes:
        """Return what the client gets for one event of the engine and its parsed frame.

        Raises `AnswerMalformed`.
        """

    def done(self) -> bytes:
        """Return what the client gets at the end of a complete stream, for the engine's end."""


class WireFormat(Protocol):
    """A format in which clients send requests to one path."""

    @property
    def path(self) -> str:
        """The path of the gateway at which clients use this format."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the worker that generates the response."""

    def pdfs(self, body: Mapping[str, Any]) -> AskedPdfs:
        """Return the PDFs of a body and the model that is to read them."""

    def inspect(
        self,
        body: Mapping[str, Any],
        policy: PolicyDocument,
        fleet: FleetView,
        documents: Mapping[str, Document] = NO_DOCUMENTS,
        caller: Caller = NO_CALLER,
    ) -> Inspected:
        """Return the profile of a body and the body for workers; raise a `RequestRefused`."""

    def is_complete(self, answer: Mapping[str, Any]) -> bool:
        """Return whether a body of status 200 is a whole answer: some engines send errors so."""

    def encode(self, request: RoutingRequest, answer: dict[str, Any], body: bytes) -> bytes:
        """Return the client's body for a whole answer, which is `body` parsed.

        Raises `AnswerMalformed`.
        """

    def encoder(
        self, request: RoutingRequest, late_headers: Sequence[Header] = ()
    ) -> StreamEncoder:
        """Return the encoder of a stream, which puts headers that its head lacks into its end."""

    def response_headers(self, request_id: str) -> Headers:
        """Return headers of every response, errors too, that other formats lack."""

    def limit_headers(self, states: Iterable[LimitState], unix_s: float) -> Headers:
        """Return the headers that tell a client what remains of its limits at this time."""

    def keep_alive(self, comment: bytes) -> bytes:
        """Return what the client gets for a comment, while the engine of a stream is silent."""

    def named(self, error: GatewayError) -> GatewayError:
        """Return an error after the inspection that names fields as the client knows them."""

    def error_body(self, error: GatewayError) -> bytes:
        """Return the body of an error response."""

    def error_event(self, error: GatewayError) -> bytes:
        """Return the last event of a stream that an error ends."""


WORKER_PATHS: Mapping[Endpoint, str] = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.EMBEDDINGS: "/v1/embeddings",
    Endpoint.RERANK: "/v1/rerank",
}
