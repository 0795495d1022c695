"""Request bodies that differ in chosen fields, and their profiles."""

from typing import Any

from paceline.request.parser import read_profile
from paceline.request.profile import Endpoint, RequestProfile
from tests.support.images import data_url, png_header

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
"""A function that the demo calls when it is asked for the weather of a city."""
PICTURE = data_url(png_header(20, 10))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def make_tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested_json(levels: int) -> Any:
    """Return a schema with this number of levels."""
    schema: Any = "string"
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


def read_chat(**fields: Any) -> RequestProfile:
    """Parse a minimal chat request with these additional fields."""
    body = {"model": "m", "messages": [user("Hi")], **fields}
    return read_profile(body, Endpoint.CHAT)


def read_content_parts(*parts: Any) -> RequestProfile:
    """Parse a chat request with a single message of these parts."""
    return read_chat(messages=[user(list(parts))])
