"""The JSON Schema of a request's body, from the code that reads one.

Plain fields and their bounds are learnt by reading a body; what is more than plain is outlined here
and judged by the reader alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.request.content import ROLES
from policies.request.fields import Fields
from policies.request.parser import KNOWN_FIELDS, read_profile
from policies.request.profile import Endpoint

_TEXT = {"type": "string", "minLength": 1}
_LEAST: Mapping[Endpoint, Mapping[str, Any]] = {
    Endpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "x"},
}
"""A body that holds what must be there and nothing else."""
_OUTLINES: Mapping[str, Any] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": sorted(ROLES)},
                "content": {"type": ["string", "array", "null"]},
            },
        },
    },
    "prompt": _TEXT,
    "stop": {"type": ["string", "array", "null"]},
    "stream_options": {"type": ["object", "null"]},
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "tools": {"type": ["array", "null"], "items": {"type": "object", "required": ["function"]}},
    "response_format": {"type": ["object", "null"]},
    "chat_template_kwargs": {"type": ["object", "null"]},
    "specprefill_keep_pct": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
}


def request_schema(endpoint: Endpoint) -> dict[str, Any]:
    """Make the schema of a body for an endpoint."""
    learnt: dict[str, Any] = {}

    class Learning(Fields):
        """Finds nothing, and notes what was looked for."""

        def text(self, name: str) -> str:
            learnt[name] = _TEXT
            return super().text(name)

        def choice(self, name: str) -> bool | None:
            learnt[name] = {"type": ["boolean", "null"]}
            return super().choice(name)

        def integer(
            self, name: str, default: int | None, *, low: int, high: int = Fields.LARGEST
        ) -> int | None:
            learnt[name] = {"type": ["integer", "null"], "minimum": low, "maximum": high}
            return super().integer(name, default, low=low, high=high)

        def number(self, name: str, default: float, *, low: float, high: float) -> float:
            learnt[name] = {"type": ["number", "null"], "minimum": low, "maximum": high}
            return super().number(name, default, low=low, high=high)

    read_profile(_LEAST[endpoint], endpoint, access=Learning)
    properties = {
        name: _OUTLINES.get(name, learnt.get(name, {})) for name in sorted(KNOWN_FIELDS[endpoint])
    }
    return {
        "type": "object",
        "required": list(_LEAST[endpoint]),
        "properties": properties,
        "additionalProperties": False,
    }
