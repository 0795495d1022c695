"""What every part of the policy document has in common: frozen, strict, and nothing unsaid."""

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
"""Of a model, a pool, a lane or a route."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""What an admin says of a worker: big, bf16, lab-2."""
Text = Annotated[str, Field(min_length=1, max_length=128)]
"""What others named: keys, teams, values of headers."""


def as_list(value: object) -> object:
    """Take one text for a list of it, as people write it."""
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
"""Of a part that means nothing when it is empty; it checks that itself."""


class Section(BaseModel):
    """A part of the document: it refuses what it does not know, and what is left empty."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _says_something(cls, value: Any) -> Any:
        # A condition without a value would hold for everybody, and nobody means that.
        if value is None:
            raise PydanticCustomError("empty", "it is empty: give it a value or leave it out")
        return value

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is not given, so that what is written can be read again."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if value is not None}
