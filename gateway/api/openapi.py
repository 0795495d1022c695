"""`GET /openapi.json`: the routes of this port, with their bodies, responses and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.api.auth import ADMIN_KEY, DATA_KEY, JOIN_TOKEN
from gateway.auth.records import KeyTerms
from gateway.protocols import WIRE_FORMATS, cohere, messages
from gateway.protocols.cohere import COHERE_RERANK
from gateway.protocols.messages import MESSAGES_PATH
from gateway.protocols.openai import ANSWER_FIELDS
from gateway.protocols.responses import RESPONSES_PATH
from gateway.proxy.client import PRIORITY_HEADER
from paceline.http import HeadTooLarge, HeadTooSlow, NotHttp
from paceline.protocol import ApiError
from paceline.request.profile import GENERATING, Endpoint, Priority
from paceline.request.schema import request_schema
from paceline.request.wires import Wire
from policies.json_schema import policy_schema

JSON = "application/json"
MESSAGES_ERROR = "MessagesError"
Responses = dict[int | str, dict[str, Any]]
ERROR_SCHEMA = {
    "type": "object",
    "description": "OpenAI's format; the last event of a broken stream has it too.",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The wrong field."},
                "code": {"type": "string"},
            },
        }
    },
}
EVERYWHERE: tuple[type[ApiError], ...] = (
    NotHttp,
    HeadTooSlow,
    errors.HostRefused,
    HeadTooLarge,
    errors.GatewayError,
)
"""Errors of every route."""
WITH_BODY = (
    *(errors.BodyNotJson, errors.FieldInvalid),
    *(errors.BodyTooSlow, errors.BodyTooLarge, errors.CodingRefused),
)
FOR_CLIENTS = (errors.KeyRefused, errors.EndedKeyRefused, errors.PageRefused)
FOR_ADMINS = (errors.AdminKeyRefused,)
STORED = (errors.RecordsUnwritable, errors.WriteUnconfirmed)


_NO_KEY = ""
_TAGS = {
    DATA_KEY: ("For clients", "With an API key, if the gateway has any."),
    _NO_KEY: ("For everyone", "Without a key."),
    ADMIN_KEY: ("For admins", "With the admin key."),
    JOIN_TOKEN: ("For workers", "With the join token, or the token of a paired worker."),
}
"""Groups of routes and their descriptions, by the kind of key."""


def failures(*known: type[ApiError], shape: str = "Error") -> Responses:
    """Describe the responses of these errors and of the errors that every route may return."""
    statuses: dict[int, list[str]] = {}
    for error in sorted({*known, *EVERYWHERE}, key=lambda one: (one.status, one.__name__)):
        meaning = (error.__doc__ or "").partition("\n")[0]
        statuses.setdefault(error.status, []).append(f"`{error.code}`: {meaning}")
    return {
        status: {
            "description": " ".join(meanings),
            "content": {JSON: {"schema": ref(shape)}},
        }
        for status, meanings in statuses.items()
    }


def success(schema: Any, *texts: str) -> Responses:
    """Describe a successful response: JSON of a schema, or text in other media types."""
    content = {JSON: {"schema": schema}}
    content |= {kind: {"schema": {"type": "string"}} for kind in texts}
    return {200: {"description": "Success.", "content": content}}


def takes(schema: Any, *kinds: str) -> dict[str, Any]:
    """Describe a body of one of these media types that FastAPI does not parse."""
    content = {kind: {"schema": schema} for kind in kinds or (JSON,)}
    return {"requestBody": {"required": True, "content": content}}


def ref(name: str) -> Mapping[str, str]:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


# The status has models of the same names as the policy.
_POLICY_PART = "PolicyPart"
_POLICY_REF = f"#/components/schemas/{_POLICY_PART}{{model}}"
_VALIDATION_ERROR = "HTTPValidationError"
_PROXY_ERRORS = (
    *(*FOR_CLIENTS, *WITH_BODY, errors.KeyEnded, errors.PoolsNotAllowed, errors.ModelUnknown),
    errors.ModelUnsuited,
    *(errors.TokensOverLimit, errors.Quarantined, errors.LimitReached, errors.NoWorker),
    *(errors.QueueFull, errors.QueueTimeout, errors.ShuttingDown, errors.Overloaded),
    *(errors.RequestTooLong, errors.WorkerUnreachable, errors.WorkerBusy, errors.WorkerLost),
    *(errors.WorkerFailed, errors.WorkerSilent, errors.WorkerStalled, errors.Interrupted),
    errors.AnswerTooLarge,
)
"""Errors of the routes that the proxy serves."""
_MESSAGES, _RESPONSES, _COHERE_RERANK = "messages", "responses", "cohere_rerank"
_SUMMARIES = {
    Endpoint.CHAT.value: "Answer a chat",
    Endpoint.COMPLETIONS.value: "Continue a text",
    Endpoint.EMBEDDINGS.value: "Return vectors of texts",
    Endpoint.RERANK.value: "Rank documents by their relevance to a query",
    _COHERE_RERANK: "Rank documents in Cohere's format",
    _MESSAGES: "Answer a chat in Anthropic's format",
    _RESPONSES: "Answer a chat as a response",
}


_ANSWER_FIELDS = {
    **{endpoint.value: field for endpoint, field in ANSWER_FIELDS.items()},
    _COHERE_RERANK: "results",
    _MESSAGES: "content",
    _RESPONSES: "output",
}
_ERROR_SCHEMAS = {_MESSAGES: MESSAGES_ERROR, _COHERE_RERANK: "CohereError"}


class OpenApiDocument:
    """The document of an app, written at the first request: all routes are added by then."""

    def __init__(self, app: FastAPI, *, proxied: bool) -> None:
        self._app = app
        self._proxied = proxied
        self._text = b""
        self._writing = asyncio.Lock()

    async def read(self) -> bytes:
        """Return the document as JSON."""
        async with self._writing:
            if not self._text:
                self._text = await asyncio.to_thread(_write, self._app, proxied=self._proxied)
        return self._text


router = APIRouter()


@router.get("/openapi.json", responses=failures() | success({"type": "object"}))
async def show(request: Request) -> Response:
    """Show this document, which needs no key because it contains no secret."""
    document: OpenApiDocument = request.app.state.openapi
    return Response(await document.read(), media_type=JSON)


def _write(app: FastAPI, *, proxied: bool) -> bytes:
    document = app.openapi()
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path in document["paths"].values():
        for operation in path.values():
            # `app.py` renders validation errors as 400, and not as FastAPI's 422.
            if _VALIDATION_ERROR in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
            # FastAPI names a route for its function; the docstring is a sentence.
            if "description" in operation:
                sentence, _, rest = operation.pop("description").partition("\n\n")
                operation["summary"] = sentence.removesuffix(".")
                operation.update({"description": rest} if rest else {})
    for name in (_VALIDATION_ERROR, "ValidationError"):
        schemas.pop(name, None)
    schemas |= _schemas()
    if proxied:
        names = {
            path: _COHERE_RERANK if one is COHERE_RERANK else one.endpoint.value
            for path, one in WIRE_FORMATS.items()
        }
        names |= {MESSAGES_PATH: _MESSAGES, RESPONSES_PATH: _RESPONSES}
        for path, name in reversed(names.items()):
            others = document["paths"].pop(path, {})
            document["paths"] = {path: {"post": _proxy_operation(name), **others}} | document[
                "paths"
            ]
    _group_by_key(document)
    return to_json(document)


def _group_by_key(document: dict[str, Any]) -> None:
    """Tag each operation with the kind of key that it needs."""
    used = set()
    for path in document["paths"].values():
        for operation in path.values():
            schemes = [name for need in operation.get("security", ()) for name in need]
            scheme = schemes[0] if schemes else _NO_KEY
            used.add(scheme)
            operation["tags"] = [_TAGS[scheme][0]]
    document["tags"] = [
        {"name": name, "description": text}
        for scheme, (name, text) in _TAGS.items()
        if scheme in used
    ]


def _proxy_operation(name: str) -> Mapping[str, Any]:
    """Describe a route of the proxy, which FastAPI does not serve."""
    whole = {"type": "object", "required": [_ANSWER_FIELDS[name]]}
    own = (errors.PreviousUnknown, errors.RecordsUnwritable)
    known = (*_PROXY_ERRORS, *(own if name == _RESPONSES else ()))
    failed = failures(*known, shape=_ERROR_SCHEMAS.get(name, "Error"))
    streams = {*GENERATING, _MESSAGES, _RESPONSES}
    answers = success(whole, *(("text/event-stream",) if name in streams else ())) | failed
    priority = {
        "name": PRIORITY_HEADER,
        "in": "header",
        "description": "The priority in the queue.",
        "schema": {"type": "string", "enum": list(Priority)},
    }
    return {
        "summary": _SUMMARIES[name],
        "operationId": f"{'generate' if name in streams else 'create'}_{name}",
        "security": [{DATA_KEY: []}],
        "parameters": [priority],
        **takes(ref(name)),
        "responses": {str(status): answer for status, answer in answers.items()},
    }


def _schemas() -> dict[str, Any]:
    """Return the schemas of bodies that FastAPI does not parse, and of errors."""
    policy = policy_schema(_POLICY_REF)
    parts = {_POLICY_PART + name: part for name, part in policy.pop("$defs", {}).items()}
    terms = KeyTerms.model_json_schema(ref_template="#/components/schemas/{model}")
    return {
        **parts,
        **terms.pop("$defs", {}),
        **{wire.name.lower(): request_schema(wire) for wire in Wire},
        _COHERE_RERANK: cohere.SCHEMA,
        MESSAGES_ERROR: messages.ERROR_SCHEMA,
        "CohereError": cohere.ERROR_SCHEMA,
        "PolicyDocument": policy,
        "KeyTerms": terms,
        "Error": ERROR_SCHEMA,
    }
