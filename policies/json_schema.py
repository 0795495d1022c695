"""The JSON Schema of the policy document, for completion in editors.

`python -m policies.json_schema > policies/schema.json` updates the published file, which a test
compares.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from policies.document import PolicyDocument

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> str:
    """Return the published schema as text."""
    return to_text(policy_schema("#/$defs/{model}"), "Paceline policy")


def to_text(schema: dict[str, Any], title: str) -> str:
    """Return a schema as the text of its published file."""
    return json.dumps({"$schema": _DIALECT, **schema, "title": title}, indent=2) + "\n"


def policy_schema(ref_template: str) -> dict[str, Any]:
    """Return the schema; `ref_template` is the form of references to its parts."""
    return PolicyDocument.model_json_schema(schema_generator=_Schema, ref_template=ref_template)


class UntitledSchema(GenerateJsonSchema):
    """Pydantic's generator without titles, which only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Omit the title of a field."""
        return False


class _Schema(UntitledSchema):
    """The generator without nulls and null defaults."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Omit null, because the document rejects empty fields."""
        return self.generate_inner(schema["schema"])

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Reject the names that the document rejects."""
        made = super().dict_schema(schema)
        return {**made, "additionalProperties": False} if "patternProperties" in made else made

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Omit null as a default."""
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


if __name__ == "__main__":
    sys.stdout.write(schema())
