"""The `openai` package's own types of Responses, read strictly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from openai import BaseModel
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

OURS = frozenset(("store",))
"""Fields of a response that the types of the package lack; OpenAI sends it too."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_strictly(kind: Any, data: Any) -> Any:
    """Validate data by a type of the package, with no field that it does not know but `OURS`."""
    read = _adapter(kind).validate_python(data, strict=True)
    assert set(_unknown(read)) <= OURS
    return read


def read_response(data: Any) -> Response:
    """Validate a response."""
    response: Response = read_strictly(Response, data)
    return response


def read_event(data: Any) -> Any:
    """Validate an event of a stream."""
    return read_strictly(ResponseStreamEvent, data)


def _unknown(value: Any) -> Iterator[str]:
    """Yield the names of all fields that the types do not know."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, dict):
        for one in value.values():
            yield from _unknown(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _unknown(one)
