"""The own types of the packages `openai` and `anthropic`, which read our answers strictly."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import httpx
from anthropic.types import RawMessageStreamEvent
from openai.types import Completion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

OURS = frozenset("store presence_penalty frequency_penalty bytes error".split())
"""Fields of a response and of its events that the types of the package lack; OpenAI sends them."""
CHAT_OURS = frozenset(("metrics", "stop_reason", "system_tokens"))
"""Fields of a chat's answer that the types of the package lack; vLLM has the second."""
PING = {"type": "ping"}
"""An event that Anthropic documents, and no type of the package describes."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_strictly(kind: Any, data: Any, ours: frozenset[str] = OURS) -> Any:
    """Validate JSON or its data by a type of a package, without fields that it does not know.

    `ours`: the names of those that there may be all the same.
    """
    text = data if isinstance(data, bytes | str) else json.dumps(data)
    read = _adapter(kind).validate_json(text, strict=True)
    assert set(_unknown(read)) <= ours
    return read


async def read_whole_and_streamed(
    url: str, body: Mapping[str, Any], whole: Any, chunk: Any
) -> tuple[Any, list[Any]]:
    """Validate the answer to a request of OpenAI, and the chunks of its stream, by these types."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(url, json=body)
        stream = await client.post(url, json=streamed)
    *events, done = stream.content.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    frames = [event.removeprefix(b"data: ") for event in events if not event.startswith(b":")]
    if chunk is Completion:  # OpenAI sends null before the end too, unlike what the type says
        null, stop = b'"finish_reason":null', b'"finish_reason":"stop"'
        frames = [frame.replace(null, stop) for frame in frames]
    return (
        read_strictly(whole, answer.content, CHAT_OURS),
        [read_strictly(chunk, frame, CHAT_OURS) for frame in frames],
    )


def read_response(data: Any) -> Response:
    return read_strictly(Response, data)


def read_event(data: Any) -> Any:
    return read_strictly(ResponseStreamEvent, data)


def read_message_events(stream: bytes, kind: Any = RawMessageStreamEvent) -> Sequence[Any]:
    """Validate the events of a message's stream, each under its own name, without its pings."""
    found = []
    for event in stream.decode().removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        if json.loads(data.removeprefix("data: ")) != PING:
            found.append(read_strictly(kind, data.removeprefix("data: "), frozenset()))
            assert name == f"event: {found[-1].type}"
    return found


def _unknown(value: Any) -> Iterator[str]:
    """Yield the names of all fields that the types do not know."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, dict):
        for one in value.values():
            yield from _unknown(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _unknown(one)
