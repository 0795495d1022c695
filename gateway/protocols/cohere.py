"""Cohere's rerank: a request becomes one of `/v1/rerank`, and its answer Cohere's results.

https://docs.cohere.com/reference/rerank. Cohere cuts documents that are too long.
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from gateway import errors
from gateway.protocols.base import object_in, object_schema, objects_in
from gateway.protocols.openai import InspectionContext, WireFormat
from gateway.routing.select import RoutingRequest
from gateway.strict_json import encode_json
from gateway.types import Inspected, Json
from paceline.request.fields import FieldError
from paceline.request.profile import Endpoint
from paceline.request.wires import Wire, unknown

_DEFAULTS = {"max_tokens_per_doc": 4096, "return_documents": False}
"""Cohere's; workers have others."""
SCHEMA = object_schema(
    "model query documents",
    "priority",
    model={"type": "string", "minLength": 1},
    query={"type": "string", "minLength": 1},
    documents={"type": "array", "minItems": 1, "items": {"type": ["string", "object"]}},
    top_n={"type": ["integer", "null"], "minimum": 1},
    max_tokens_per_doc={"type": ["integer", "null"], "minimum": 1},
    return_documents=["boolean", "null"],
)
"""The JSON Schema of a body."""
ERROR_SCHEMA = object_schema("message error", strict=False, message="string", error="object") | {
    "description": "Cohere's shape, with the error in OpenAI's too."
}


class CohereRerankFormat(WireFormat):
    """`POST /v2/rerank`, which any worker serves that serves `/v1/rerank`."""

    def _inspect(self, body: Mapping[str, Any], context: InspectionContext) -> Inspected:
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - SCHEMA["properties"]:
            raise FieldError(name[:100], unknown(name[:100], Wire.RERANK))
        return self._inspect_openai({**_DEFAULTS, **given, "truncate": True}, context)

    def encode(self, request: RoutingRequest, answer: Json, body: bytes) -> bytes:
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
