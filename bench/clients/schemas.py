"""Pydantic models that programs ask for, and the fields that the models of a client do not know.

pydantic belongs to the environment of the client.
"""

from typing import Literal

from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)
    mood: Literal["merry", "sad"]


class City(BaseModel):
    """A city."""

    city: str


class Anything(BaseModel, extra="allow"):
    """Any object."""


def unknown_fields(*values: object) -> set[str]:
    """Return the names of fields in these values that their classes do not declare."""
    unknown: set[str] = set()
    for value in values:
        if isinstance(value, BaseModel):
            extra = value.model_extra or {}
            known = [getattr(value, name) for name in type(value).model_fields]
            unknown |= {f"{type(value).__name__}.{name}" for name in extra} | unknown_fields(*known)
        elif isinstance(value, list | tuple):
            unknown |= unknown_fields(*value)
        elif isinstance(value, dict):
            unknown |= unknown_fields(*value.values())
    return unknown
