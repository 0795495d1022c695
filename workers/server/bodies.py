"""The JSON body of a request, bounded while it is read."""

from __future__ import annotations

import asyncio
import json
from typing import cast

from starlette.requests import Request

from workers.server.errors import BadRequest, BodyTooLarge
from workers.server.ports import Json

MAX_BODY_BYTES = 64 * 1024 * 1024
_PARSE_INLINE_BYTES = 64 * 1024
"""Parsing this much takes under a millisecond; more is parsed off the event loop."""


async def read_json(request: Request) -> dict[str, Json]:
    """Return the body as a JSON object; raise `BadRequest` or `BodyTooLarge`."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY_BYTES:
            raise BodyTooLarge(MAX_BODY_BYTES)
    if len(content) <= _PARSE_INLINE_BYTES:
        return _parse(content)
    return await asyncio.to_thread(_parse, content)


def _parse(content: bytearray) -> dict[str, Json]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    return cast("dict[str, Json]", body)
