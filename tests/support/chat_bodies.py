"""Bodies of requests by what a test changes in them, and the reading of them."""

from __future__ import annotations

from typing import Any

from policies.request.parser import read_profile
from policies.request.profile import Endpoint, RequestProfile
from tests.support.images import data_url, png_header

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
PICTURE = data_url(png_header(20, 10))


def make_tool(parameters: Any) -> dict[str, Any]:
    """A tool whose arguments are of this schema."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested_json(levels: int) -> Any:
    """A schema that is so many levels deep."""
    schema: Any = "string"
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def read_chat(**fields: Any) -> RequestProfile:
    """Read a chat request that has these fields beside the two that each one needs."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    return read_profile(body, Endpoint.CHAT)


def read_content_parts(*parts: Any) -> RequestProfile:
    """Read a chat request whose one message is of these parts."""
    return read_chat(messages=[{"role": "user", "content": list(parts)}])
