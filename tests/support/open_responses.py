"""The schemas of Open Responses, which each answer of `/v1/responses` follows.

The package has a client too, which no test uses: its code is not even imported.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import httpx
from jsonschema_rs import Draft202012Validator, Registry

PATH = "/v1/responses"
DONE = "data: [DONE]"
VERSION = "2026-04-24"
_URN = "urn:open-responses"
Schema = dict[str, Any]

OPENAI_TYPES: Mapping[str, Sequence[str]] = {
    # The specification has functions alone, and leaves other tools to prefixes of their makers.
    "Tool": ("custom", "namespace", "tool_search"),
    "tool_choice": ("custom",),
    # Their calls, and what OpenAI keeps of a conversation.
    "ItemField": (
        *("custom_tool_call", "custom_tool_call_output", "tool_search_call", "tool_search_output"),
        *("web_search_call", "item_reference"),
    ),
}
"""Types of OpenAI's own API that a union of the specification lacks."""
OPENAI_EVENTS = frozenset(
    "response.custom_tool_call_input.delta response.custom_tool_call_input.done "
    # `response.reasoning.*` in the specification: OpenAI's SDKs know no event of that name.
    "response.reasoning_text.delta response.reasoning_text.done".split()
)
"""Events of OpenAI's own API that the specification lacks."""


def _mended(schemas: dict[str, Schema]) -> dict[str, Schema]:
    """Return the schemas without their errors, and with the types of OpenAI's own API."""
    # A format repeats its schema, which may be null alone here.
    schemas["JsonSchemaResponseFormat"]["properties"]["schema"] = {"type": "object"}
    # The description of this effort is there, and the value is not.
    schemas["ReasoningEffortEnum"]["enum"].append("minimal")
    response = schemas["ResponseResource"]["properties"]
    unions = {**schemas, "tool_choice": response["tool_choice"]}
    for name, types in OPENAI_TYPES.items():
        one = {"required": ["type"], "properties": {"type": {"enum": [*types]}}}
        unions[name]["oneOf"].append({"type": "object", **one})
    return schemas


@cache
def _validators(*, published: bool = False) -> Mapping[str, Draft202012Validator]:
    """Return the validators by the names of the schemas, those of events by their types."""
    file = distribution("openresponses-py").locate_file(f"openresponses/openapi/{VERSION}.json")
    schemas = json.loads(Path(str(file)).read_text())["components"]["schemas"]
    schemas = schemas if published else _mended(schemas)
    # Each validator of its own document would keep a copy of all schemas, a megabyte.
    registry = Registry([(_URN, {"components": {"schemas": schemas}})])

    def validator(name: str) -> Draft202012Validator:
        ref = {"$ref": f"{_URN}#/components/schemas/{name}"}
        return Draft202012Validator(ref, registry=registry)

    names = ("ResponseResource", "ItemField", "ErrorPayload")
    events = {
        schema["properties"]["type"]["enum"][0]: validator(name)
        for name, schema in schemas.items()
        if name.endswith("StreamingEvent")
    }
    return {name: validator(name) for name in names} | events


def problems_of(value: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what is wrong with a value by a published schema, its errors included."""
    validator = _validators(published=True).get(name)
    if validator is None:
        yield f"no schema of {name}"
        return
    for error in validator.iter_errors(value):
        place = ".".join((name, *map(str, error.instance_path)))
        told = "fits no schema" if error.message.startswith("{") else error.message[:80]
        yield f"{place}: {told}"


def check_event(event: Mapping[str, Any]) -> None:
    """Check an event of a stream by the schema of its type."""
    if event["type"] not in OPENAI_EVENTS:
        _validators()[event["type"]].validate(event)


def check_body(body: Mapping[str, Any]) -> None:
    """Check a body: a response, a page of items, or an error."""
    if "error" in body and "object" not in body:
        _validators()["ErrorPayload"].validate(body["error"])
    elif body["object"] == "list":
        for item in body["data"]:
            _validators()["ItemField"].validate(item)
    elif not body.get("deleted") and body["object"] == "response":
        _validators()["ResponseResource"].validate(body)
    else:
        assert body.get("deleted") is True or body["object"] == "response.input_tokens"


def read_stream(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each under its name, and numbered."""
    found = []
    for piece in text.removesuffix(f"{DONE}\n\n").split("\n\n"):
        if piece and not piece.startswith(":"):
            name, data = piece.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    numbers = [event["sequence_number"] for event in found]
    assert numbers == [*range(numbers[0], numbers[0] + len(found))] if found else True
    return found


def check_stream(text: str) -> list[dict[str, Any]]:
    """Check a stream that has ended; return its events."""
    assert text.endswith(f"{DONE}\n\n")
    found = read_stream(text)
    for event in found:
        check_event(event)
    return found


class CheckingTransport(httpx.HTTPTransport):
    """Checks each answer of `/v1/responses` that its client reads to the end."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path.startswith(PATH):
            response.stream = _Checked(response)
        return response


class _Checked(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response) -> None:
        self._stream = response.stream
        self._events = response.headers.get("content-type", "").startswith("text/event-stream")

    def __iter__(self) -> Iterator[bytes]:
        pieces = []
        assert isinstance(self._stream, httpx.SyncByteStream)
        for piece in self._stream:
            pieces.append(piece)
            yield piece
        text = b"".join(pieces).decode()
        if self._events:
            check_stream(text)
        elif text:  # a preflight has none
            check_body(json.loads(text))

    def close(self) -> None:
        assert isinstance(self._stream, httpx.SyncByteStream)
        self._stream.close()
