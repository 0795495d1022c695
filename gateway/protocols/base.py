"""The common part of wire formats: reading answers, naming fields, encoding streams."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic_core import from_json

from gateway.errors import GatewayError
from gateway.strict_json import encode_json
from gateway.types import Json


def object_schema(required: str, *fields: str, strict: bool = True, **types: Any) -> Json:
    """Return the JSON Schema of an object with these fields, the latter of a type or a schema."""
    properties: Json = {name: {} for name in sorted(fields)}
    for name, one in types.items():
        properties[name] = one if isinstance(one, dict) else {"type": one}
    others = {"additionalProperties": False} if strict else {}
    return {"type": "object", "required": required.split(), **others, "properties": properties}


class AnswerMalformed(ValueError):
    """An engine's answer has values of other types than a format translates."""


def object_in(answer: Mapping[str, Any], name: str) -> Json:
    """Return the object in a field of an engine's answer, else an empty one."""
    value = answer.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):  # faster than `Mapping`, and a parsed answer has no other
        raise AnswerMalformed(name)
    return value


def objects_in(answer: Mapping[str, Any], name: str) -> list[Json]:
    """Return the list of objects in a field of an engine's answer, else an empty one."""
    values = answer.get(name)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise AnswerMalformed(name)
    return values


def choice_of(answer: Mapping[str, Any]) -> Json:
    """Return the first choice of an engine's answer or chunk, else an empty one."""
    choices = objects_in(answer, "choices")
    return choices[0] if choices else {}


def text_in(answer: Mapping[str, Any], name: str) -> str:
    """Return the text in a field of an engine's answer, else an empty one."""
    value = answer.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise AnswerMalformed(name)
    return value


def arguments_in(text: str) -> Json | None:
    """Return the arguments of a call; None if the text is no whole object."""
    try:
        given = from_json(text, allow_inf_nan=False)
    except ValueError:
        return None
    return given if isinstance(given, dict) else None


def call_of(call_id: str, name: str, arguments: str) -> Json:
    """Return the call of a function in a chat."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def renamed(error: GatewayError, own_name: Callable[[str], str]) -> GatewayError:
    """Return an error that names a field as its client knows it, in the message too."""
    if error.param is None or (param := own_name(error.param)) == error.param:
        return error
    pairs = ((error.param, param), (error.param.rpartition(".")[2], param.rpartition(".")[2]))
    for chat_name, name in pairs:
        error.message = error.message.replace(f"'{chat_name}'", f"'{name}'")
    if param not in error.message:
        error.message = f"{param}: {error.message}"
    error.param = param
    return error


def encode_event(fields: Json) -> bytes:
    """Return an event of a stream, which is named by its type."""
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), encode_json(fields))


def encode_events(events: Iterable[Json]) -> bytes:
    """Return events of a stream."""
    return b"".join(map(encode_event, events))


class StreamEncoder(ABC):
    """Encodes one stream of events for a client."""

    passthrough = False
    """Whether text events pass unchanged, so that they need not be parsed."""
    failovers = 0
    """How often the stream has gone on at another worker."""

    @abstractmethod
    def event(self, event: bytes, frame: Json) -> bytes:
        """Return the client's bytes for one event of the engine and its parsed frame.

        Raises `AnswerMalformed`.
        """

    @abstractmethod
    def done(self) -> bytes:
        """Return the client's bytes at the end of a complete stream, for the engine's end."""


CUT = ("length", "content_filter")
"""Reasons of ends that came before the model's own: the last call may be half of one."""
