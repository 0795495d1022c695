"""The JSON Schema of the policy document, from the document itself: what editors complete.

`python -m policies.schema > policies/schema.json` writes it anew; a test says when that is due.
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
    """Write the schema as it is published."""
    made = policy_schema("#/$defs/{model}")
    titled = {"$schema": _DIALECT, **made, "title": "Paceline policy"}
    return json.dumps(titled, indent=2) + "\n"


def policy_schema(ref_template: str) -> dict[str, Any]:
    """Make the schema, its parts named as the page that it stands on names them."""
    return PolicyDocument.model_json_schema(schema_generator=_Schema, ref_template=ref_template)


class _Schema(GenerateJsonSchema):
    """As pydantic writes it, without what an editor would rather not hear."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Leave null out: a field that is left empty is refused."""
        return self.generate_inner(schema["schema"])

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Refuse the names that the document refuses."""
        made = super().dict_schema(schema)
        return {**made, "additionalProperties": False} if "patternProperties" in made else made

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Leave out that an absent field is absent."""
        if schema.get("default", ...) is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        """Leave titles out: they say what the names say."""
        return False


if __name__ == "__main__":
    sys.stdout.write(schema())
