"""`GET /openapi.json`: all that is served on this port, what each route takes and what may come."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.responses import Response

from gateway import errors
from gateway.api.auth import DATA_KEY
from gateway.auth.records import KeyRecord, KeyTerms
from gateway.errors import (
    KeyEnded,
    LimitReached,
    ModelUnknown,
    PoolsNotAllowed,
    Quarantined,
    TokensOverLimit,
)
from gateway.proxy.client import PRIORITY_HEADER
from gateway.proxy.handler import ENDPOINTS
from gateway.routes.documented import (
    ERROR_SCHEMA,
    FOR_CLIENTS,
    JSON,
    WITH_BODY,
    failures,
    parameter,
    ref,
    success,
    takes,
)
from policies.document import Priority
from policies.request.profile import Endpoint
from policies.request.schema import request_schema
from policies.schema import policy_schema
from workers.protocol import WorkerReport

PATH = "/openapi.json"
_REF = "#/components/schemas/{model}"
# The state has pools, too, and they are not those that a policy writes down.
_POLICY_PART = "PolicyPart"
_POLICY_REF = f"#/components/schemas/{_POLICY_PART}{{model}}"
_NO_LONGER = "HTTPValidationError"
_RELAYED = (
    *(*FOR_CLIENTS, KeyEnded, PoolsNotAllowed, ModelUnknown, *WITH_BODY, TokensOverLimit),
    *(Quarantined, LimitReached, errors.NoWorker, errors.QueueFull, errors.QueueTimeout),
    *(errors.Stopping, errors.Overloaded, errors.RequestTooLong, errors.WorkerUnreachable),
    *(errors.WorkerBusy, errors.WorkerLost, errors.WorkerFailed, errors.WorkerSilent),
    errors.WorkerStalled,
)
"""What may come in place of an answer of a worker."""


def published(panel: FastAPI, *, relayed: bool) -> APIRouter:
    """Hold the route of the document; it tells no secret, so anybody may read it."""
    router = APIRouter()
    written: list[bytes] = []
    writing = asyncio.Lock()

    @router.get(PATH, responses=failures() | success({"type": "object"}))
    async def document() -> Response:
        async with writing:
            if not written:  # at the first request: by then all routes are there
                written.append(await asyncio.to_thread(_write, panel, relayed=relayed))
        return Response(written[0], media_type=JSON)

    return router


def _write(panel: FastAPI, *, relayed: bool) -> bytes:
    document = panel.openapi()
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path in document["paths"].values():
        for operation in path.values():
            _settle(operation)
    for name in (_NO_LONGER, "ValidationError"):
        schemas.pop(name, None)
    schemas |= _schemas()
    if relayed:
        for path, endpoint in ENDPOINTS.items():
            document["paths"][path] = {"post": _relayed(endpoint)}
    return to_json(document)


def _settle(operation: dict[str, Any]) -> None:
    """Leave out what FastAPI would answer if it read bodies and parameters itself."""
    unread = operation["responses"].get("422", {})
    if _NO_LONGER in str(unread):
        del operation["responses"]["422"]


def _relayed(endpoint: Endpoint) -> Mapping[str, Any]:
    """Tell of a route that FastAPI does not know: the data plane goes past it."""
    whole = {"type": "object", "required": ["choices"]}
    answers = success(whole, "text/event-stream") | failures(*_RELAYED)
    priority = parameter(PRIORITY_HEADER, "header", "How urgent it is.", enum=list(Priority))
    return {
        "summary": f"Generate: {endpoint}",
        "operationId": f"generate_{endpoint}",
        "security": [{DATA_KEY: []}],
        **takes(ref(endpoint), headers=[priority]),
        "responses": {str(status): told for status, told in answers.items()},
    }


def _schemas() -> dict[str, Any]:
    """Make the schemas that routes point to, each from what reads or writes it."""
    policy = policy_schema(_POLICY_REF)
    parts = {_POLICY_PART + name: told for name, told in policy.pop("$defs", {}).items()}
    _, made = models_json_schema(
        [(KeyTerms, "validation"), (WorkerReport, "validation"), (KeyRecord, "serialization")],
        ref_template=_REF,
    )
    named = {**parts, **made["$defs"]}
    record = named.pop("KeyRecord")
    properties = {name: told for name, told in record["properties"].items() if name != "digest"}
    properties["state"] = {"enum": ["active", "expired", "revoked"]}
    key = {**record, "properties": properties, "required": list(properties)}
    secret = {"secret": {"type": "string", "description": "Shown this once."}}
    made_key = {**key, "properties": properties | secret, "required": [*properties, "secret"]}
    return {
        **named,
        **{endpoint.value: request_schema(endpoint) for endpoint in Endpoint},
        "PolicyDocument": policy,
        "Key": key,
        "KeyMade": made_key,
        "Error": ERROR_SCHEMA,
    }
