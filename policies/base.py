"""The base class and the field types of the sections of a policy document."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
"""The name of a model, pool, lane or route."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A label of a worker, such as big, bf16 or lab-2."""
Text = Annotated[str, Field(min_length=1, max_length=128)]
"""A name from outside the document: a key, a team, the value of a header."""


def as_list(value: object) -> object:
    """Return a single string as a list of one."""
    return [value] if isinstance(value, str) else value


Names = Annotated[
    tuple[Name, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(
        as_list, json_schema_input_type=Name | Annotated[list[Name], Field(min_length=1)]
    ),
]
Texts = Annotated[
    tuple[Text, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(
        as_list, json_schema_input_type=Text | Annotated[list[Text], Field(min_length=1)]
    ),
]


NON_EMPTY = ConfigDict(json_schema_extra={"minProperties": 1})
"""The configuration of a section that needs at least one field; its validator checks it."""


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
