"""Cohere's rerank: a request becomes one of `/v1/rerank`, and its answer Cohere's results.

https://docs.cohere.com/reference/rerank. Cohere cuts documents that are too long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from gateway import errors
from gateway.protocols.base import object_in, objects_in
from gateway.protocols.documents import NO_DOCUMENTS, Document
from gateway.protocols.openai import WireFormat
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.strict_json import encode_json
from gateway.types import NO_CALLER, Caller, Inspected
from paceline.request.profile import Endpoint
from policies.document import PolicyDocument

_DOCUMENT_TOKENS = 4096
"""Cohere's default of `max_tokens_per_doc`."""
_DEFAULTS = {"max_tokens_per_doc": _DOCUMENT_TOKENS, "return_documents": False}

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["model", "query", "documents"],
    "additionalProperties": False,
    "properties": {
        "model": {"type": "string", "minLength": 1},
        "query": {"type": "string", "minLength": 1},
        "documents": {"type": "array", "minItems": 1, "items": {"type": ["string", "object"]}},
        "top_n": {"type": ["integer", "null"], "minimum": 1},
        "max_tokens_per_doc": {"type": ["integer", "null"], "minimum": 1},
        "return_documents": {"type": ["boolean", "null"]},
        "priority": {},
    },
}
"""The JSON Schema of a body."""
ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "description": "Cohere's shape, with the error in OpenAI's too.",
    "required": ["message", "error"],
    "properties": {"message": {"type": "string"}, "error": {"type": "object"}},
}


class CohereRerankFormat(WireFormat):
    """`POST /v2/rerank`, which any worker serves that serves `/v1/rerank`."""

    def inspect(
        self,
        body: Mapping[str, Any],
        policy: PolicyDocument,
        fleet: FleetView,
        documents: Mapping[str, Document] = NO_DOCUMENTS,  # noqa: ARG002
        caller: Caller = NO_CALLER,  # noqa: ARG002
    ) -> Inspected:
        """Translate a body, and inspect that; raise a `RequestRefused`."""
        for name in body:
            if name not in SCHEMA["properties"]:
                raise errors.FieldInvalid(f"Unknown field '{name[:100]}'.", param=name[:100])
        given = {name: value for name, value in body.items() if value is not None}
        return self.inspect_translated({**_DEFAULTS, **given, "truncate": True}, policy, fleet)

    def encode(self, request: RoutingRequest, answer: dict[str, Any], body: bytes) -> bytes:  # noqa: ARG002
        """Return the results of a whole answer, and the tokens that were read."""
        names = ("index", "relevance_score", "document")
        results = [
            {name: result[name] for name in names if name in result}
            for result in objects_in(answer, "results")
        ]
        read = object_in(answer, "usage").get("prompt_tokens", 0)
        tokens = {"input_tokens": read, "output_tokens": 0}
        meta = {"api_version": {"version": "2"}, "tokens": tokens}
        return encode_json({"results": results, "meta": meta})

    def error_body(self, error: errors.GatewayError) -> bytes:
        """Return the body of an error response."""
        return to_json({"message": error.message, **error.body()})


COHERE_RERANK = CohereRerankFormat(Endpoint.RERANK)
