"""The base classes of the sections of a policy document."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

Text = Annotated[str, Field(min_length=1, max_length=128)]
"""A name from outside the document: a key, a team, the value of a header."""


def as_list(value: object) -> object:
    """Return a single string as a list of one."""
    return [value] if isinstance(value, str) else value


class _OneOrList:
    """The JSON Schema of a list that a single entry may replace."""

    @staticmethod
    def __get_pydantic_json_schema__(
        schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        entries = handler(schema)
        return {"anyOf": [entries["items"], entries]}


Entry = TypeVar("Entry")
OneOrMore = Annotated[
    tuple[Entry, ...], Field(strict=False, min_length=1), BeforeValidator(as_list), _OneOrList
]
"""A list of strings, or one string."""


class Section(BaseModel):
    """A section of the document; it rejects unknown fields and empty values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_empty(cls, value: Any) -> Any:
        # A condition without a value would match every request.
        if value is None:
            raise PydanticCustomError("empty", "it is empty: set a value or remove the field")
        return value

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit absent fields, because a null in the output would be rejected when it is read."""
        document: dict[str, Any] = handler(self)
        return {name: value for name, value in document.items() if value is not None}


class NonEmptySection(Section):
    """A section that needs at least one field."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    if_empty: ClassVar[str]
    """The message for a section without any field."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("no_fields", self.if_empty)
        return self
