"""What wire formats share: reading an engine's answer, naming fields, encoding a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from gateway.errors import GatewayError
from paceline.request.profile import Endpoint


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


WORKER_PATHS: Mapping[Endpoint, str] = {
    Endpoint.CHAT: "/v1/chat/completions",
    Endpoint.COMPLETIONS: "/v1/completions",
    Endpoint.EMBEDDINGS: "/v1/embeddings",
    Endpoint.RERANK: "/v1/rerank",
}
