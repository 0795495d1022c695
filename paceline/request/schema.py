"""The JSON Schema of a request body, derived from the parser.

Parsing a minimal body records the plain fields and their bounds; `_OUTLINES` describes the others
in part, and only the parser checks them completely.
"""

from collections.abc import Mapping
from typing import Any

from paceline.request.content import PROMPTS_LIMIT, ROLES
from paceline.request.fields import CACHE_SALT, CACHE_SALT_CHARS, Default, Fields
from paceline.request.parser import read_profile
from paceline.request.pooling import ENCODINGS, INPUTS_LIMIT
from paceline.request.profile import REASONING_EFFORTS, Endpoint
from paceline.request.wires import HONOURED, IGNORED, IGNORED_ON, WIRE_OF, Wire, neutral_values

_TEXT = {"type": "string", "minLength": 1}


def _texts(limit: int) -> Mapping[str, Any]:
    """Return the schema of a text, of its tokens, or of several."""
    several = {"type": ["string", "array"], "items": {"type": "integer"}}
    return {
        "anyOf": [
            _TEXT,
            {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            {"type": "array", "minItems": 1, "maxItems": limit, "items": several},
        ]
    }


def _messages(*roles: str) -> Mapping[str, Any]:
    content = {"type": ["string", "array", "null"]}
    properties = {"role": {"enum": sorted(roles)}, "content": content}
    message = {"type": "object", "required": ["role"], "properties": properties}
    return {"type": "array", "minItems": 1, "items": message}


_MINIMAL_BODIES: Mapping[Endpoint, Mapping[str, Any]] = {
    Endpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "x"},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "x"},
    Endpoint.RERANK: {"model": "m", "query": "x", "documents": ["x"]},
}
"""Minimal valid bodies."""
_OUTLINES: Mapping[str, Any] = {
    "messages": _messages(*ROLES),
    "prompt": _texts(PROMPTS_LIMIT),
    "input": _texts(INPUTS_LIMIT),
    "encoding_format": {"enum": [*ENCODINGS, None]},
    "documents": {
        "type": "array",
        "minItems": 1,
        "maxItems": INPUTS_LIMIT,
        "items": {
            "type": ["string", "object"],
            "required": ["text"],
            "properties": {"text": {"type": "string"}},
        },
    },
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "stop": {"type": ["string", "array", "null"]},
    "stream_options": {"type": ["object", "null"]},
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number"}},
    "tools": {"type": ["array", "null"], "items": {"type": "object", "required": ["function"]}},
    "tool_grammars": {
        "type": ["object", "null"],
        "additionalProperties": {
            "type": "object",
            "required": ["syntax", "definition"],
            "properties": {
                "syntax": {"enum": ["lark", "regex"]},
                "definition": {"type": "string", "minLength": 1},
            },
        },
    },
    "response_format": {"type": ["object", "null"]},
    "structured_outputs": {"type": ["object", "null"]},
    "guided_json": {"type": ["object", "string", "boolean", "null"]},
    "guided_regex": {"type": ["string", "null"]},
    "guided_choice": {"type": ["array", "null"], "items": {"type": "string"}},
    "guided_grammar": {"type": ["string", "null"]},
    "chat_template_kwargs": {"type": ["object", "null"]},
    "enable_thinking": {"type": ["boolean", "null"]},
    "repeat_penalty": {"type": ["number", "null"], "minimum": 0, "maximum": 10},
    "reasoning_effort": {"enum": [*REASONING_EFFORTS, None]},
    CACHE_SALT: {"type": ["string", "null"], "minLength": 1, "maxLength": CACHE_SALT_CHARS},
    "specprefill_keep_pct": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
    "instructions": {"type": ["string", "null"]},
    "previous_response_id": {"type": ["string", "null"]},
    "store": {"type": ["boolean", "null"]},
    "system": {"type": ["string", "array", "null"]},
}
_OUTLINES_ON: Mapping[Wire, Mapping[str, Any]] = {
    Wire.RESPONSES: {
        "input": {"type": ["string", "array", "null"]},
        "tools": {"type": ["array", "null"]},
    },
    Wire.MESSAGES: {
        "messages": _messages("user", "assistant", "system"),
        "tools": {"type": ["array", "null"]},
    },
}
"""Schemas that differ on a wire."""
_REQUIRED = {Wire.RESPONSES: ["model"]}


def request_schema(wire: Wire) -> dict[str, Any]:
    """Return the schema of a body; that of a wire which becomes a chat has the chat's bounds."""
    recorded: dict[str, Any] = {}

    def record(kind: str, name: str, low: float, high: float = Fields.LARGEST, **_: Any) -> None:
        recorded[name] = {"type": [kind, "null"], "minimum": low, "maximum": high}

    class RecordingFields(Fields):
        """Fields that record every access and its bounds."""

        def text(self, name: str) -> str:
            recorded[name] = _TEXT
            return super().text(name)

        def choice(self, name: str) -> bool | None:
            recorded[name] = {"type": ["boolean", "null"]}
            return super().choice(name)

        def integer(self, name: str, default: int | None, **bounds: int) -> int | None:
            record("integer", name, **bounds)
            return super().integer(name, default, **bounds)

        def number(self, name: str, default: Default, **bounds: Any) -> float | Default:
            record("number", name, **bounds)
            return super().number(name, default, **bounds)

    endpoint = next((one for one in Endpoint if WIRE_OF[one] is wire), Endpoint.CHAT)
    read_profile(_MINIMAL_BODIES[endpoint], endpoint, access=RecordingFields)
    known = {**recorded, **_OUTLINES, **_OUTLINES_ON.get(wire, {})}
    properties = {name: known.get(name, {}) for name in sorted(HONOURED[wire])}
    neutral = sorted(neutral_values(wire).items())
    ignored = {name: {"enum": [None, *values]} for name, values in neutral}
    ignored |= {name: {} for name in sorted(IGNORED | IGNORED_ON[wire])}
    return {
        "type": "object",
        "required": _REQUIRED.get(wire, [*_MINIMAL_BODIES[endpoint]]),
        "properties": ignored | properties,
        "additionalProperties": {"type": "null"},
    }
