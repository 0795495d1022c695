"""What a route answers and takes, as the published OpenAPI tells it; from the errors themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.errors import (
    BodyNotJson,
    BodyTooLarge,
    BodyTooSlow,
    EditUnanswered,
    FieldInvalid,
    GatewayError,
    HeadTooLarge,
    HeadTooSlow,
    HostRefused,
    KeyRefused,
    NotAllowedHere,
    NotHttp,
    PageRefused,
    RecordsUnwritable,
)

JSON = "application/json"
Responses = dict[int | str, dict[str, Any]]
Extra = dict[str, Any]
Error = type[GatewayError]

ERROR_SCHEMA = {
    "type": "object",
    "description": "OpenAI's shape; the last event of a broken stream has it too.",
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
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {"type": "string"},
            },
        }
    },
}

EVERYWHERE: tuple[Error, ...] = (NotHttp, HeadTooSlow, HostRefused, HeadTooLarge, GatewayError)
"""What comes before a route is found, or where one fails."""
WITH_BODY: tuple[Error, ...] = (BodyNotJson, FieldInvalid, BodyTooSlow, BodyTooLarge)
FOR_CLIENTS: tuple[Error, ...] = (KeyRefused, PageRefused)
FOR_ADMINS: tuple[Error, ...] = (KeyRefused, NotAllowedHere)
KEPT: tuple[Error, ...] = (RecordsUnwritable, EditUnanswered)


def failures(*errors: Error) -> Responses:
    """Tell which statuses come with these errors, and what each of them means."""
    statuses: dict[int, list[str]] = {}
    for error in sorted({*errors, *EVERYWHERE}, key=lambda one: (one.status, one.__name__)):
        meaning = (error.__doc__ or "").partition("\n")[0]
        statuses.setdefault(error.status, []).append(f"`{error.code}`: {meaning}")
    return {
        status: {
            "description": " ".join(meanings),
            "content": {JSON: {"schema": ref("Error")}},
        }
        for status, meanings in statuses.items()
    }


def success(schema: Any, *texts: str, status: int = 200) -> Responses:
    """Tell what comes where all is well: JSON of a schema, or text of other kinds."""
    content = {JSON: {"schema": schema}}
    content |= {kind: {"schema": {"type": "string"}} for kind in texts}
    return {status: {"description": "As asked.", "content": content}}


def takes(schema: Any, *kinds: str, headers: Iterable[Extra] = ()) -> Extra:
    """Tell of a body of one of these kinds, and of headers that belong to it."""
    content = {kind: {"schema": schema} for kind in kinds or (JSON,)}
    told: Extra = {"requestBody": {"required": True, "content": content}}
    return told | ({"parameters": list(headers)} if headers else {})


def parameter(
    name: str, place: str, meaning: str, *, required: bool = False, **schema: Any
) -> Extra:
    """Tell of a header, or a field of the query."""
    text = {"type": "string", **schema}
    described = {"name": name, "in": place, "description": meaning, "schema": text}
    return described | ({"required": True} if required else {})


def ref(name: str) -> Mapping[str, str]:
    """Point to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}
