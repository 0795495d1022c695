"""The JSON Schema of `/v1/status`, from the typed model itself.

`python -m gateway.status_schema > docs/status.schema.json` writes it anew; a test says when that
is due.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from gateway.status.model import Status

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> str:
    """Write the schema as it is published."""
    made = Status.model_json_schema(mode="serialization", schema_generator=_Schema)
    return json.dumps({"$schema": _DIALECT, **made, "title": "Paceline status"}, indent=2) + "\n"


class _Schema(GenerateJsonSchema):
    """As pydantic writes it, without titles: they say what the names say."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave titles out."""
        return False


if __name__ == "__main__":
    sys.stdout.write(schema())
