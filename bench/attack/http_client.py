"""A client that sends any bytes, and reads a response as it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import httptools

from bench.attack.attack import Answer, Target

CHAT: Final = "/v1/chat/completions"
_READ_BYTES: Final = 1 << 16
_ANSWER_S: Final = 120.0


class _Response:
    """Callbacks of the parser."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = self.parser.get_status_code() >= 200

    def answer(self) -> Answer:
        return Answer(self.parser.get_status_code(), b"".join(self.parts), self.complete)


class Connection:
    """A connection of one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, raw: bytes) -> bool:
        """Send bytes; return whether the connection is still open."""
        try:
            self.writer.write(raw)
            await self.writer.drain()
        except ConnectionError:
            return False
        return True

    async def read_some(self) -> bytes:
        """Read a piece; none at the end of the connection."""
        try:
            return await asyncio.wait_for(self.reader.read(_READ_BYTES), _ANSWER_S)
        except (ConnectionError, TimeoutError):
            return b""

    async def read_answer(self, *, until: bytes | None = None, events: int = 0) -> Answer:
        """Read one response to its end, until a mark occurs in it, or so many events."""
        response, read = _Response(), b""
        while not response.complete and (piece := await self.read_some()):
            try:
                response.parser.feed_data(piece)
            except httptools.HttpParserError:
                break
            if until is not None:
                read = read[-len(until) :] + piece
                if until in read:
                    break
            if events and sum(part.count(b"\n\n") for part in response.parts) >= events:
                break
        return response.answer()

    async def read_all(self, quiet_s: float) -> bytes:
        """Read until the server closes the connection, or sends nothing for some time."""
        read = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while piece := await asyncio.wait_for(self.reader.read(_READ_BYTES), quiet_s):
                read += piece
        return read


@contextlib.asynccontextmanager
async def connection(port: int, *, limit: int = _READ_BYTES) -> AsyncIterator[Connection]:
    """Open a connection, and abort it at the end of the context."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def encode(
    body: bytes | None,
    *,
    path: str = CHAT,
    method: str = "POST",
    key: str = "",
    request_id: str = "",
    headers: tuple[str, ...] = (),
) -> bytes:
    """Return a complete request on a connection of its own."""
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
    if key:
        lines.append(f"authorization: Bearer {key}")
    if request_id:
        lines.append(f"x-request-id: {request_id}")
    if body is not None:
        lines += [f"content-length: {len(body)}", "content-type: application/json"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + (body or b"")


async def send(port: int, raw: bytes) -> Answer:
    """Send a request on a new connection, and read its response; status 0 if there is none."""
    try:
        async with connection(port) as opened:
            await opened.send(raw)
            return await opened.read_answer()
    except OSError:
        return Answer()


async def request(
    port: int, path: str, body: Any = None, *, method: str = "", key: str = ""
) -> Answer:
    """Send a request to a route other than inference."""
    encoded = None if body is None else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    return await send(port, encode(encoded, path=path, method=method, key=key))


async def chat(
    target: Target,
    name: str,
    body: bytes,
    *,
    path: str = CHAT,
    key: str = "",
    honest: bool = False,
) -> Answer:
    """Send a chat request with an id; record it, and the usage that an honest worker reports."""
    request_id = target.request_id(name)
    raw = encode(body, path=path, key=key or target.key, request_id=request_id)
    answer = await send(target.gateway_port, raw)
    if answer.status:
        target.sent.add(request_id)
    if honest and answer.status == 200 and not answer.streamed:
        target.read[request_id] = _tokens(answer.json()["usage"])
    return answer


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of prompt and answer, in the words of any format."""
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage["completion_tokens"]
    # Anthropic counts them apart.
    apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
    cached = sum(usage.get(name, 0) for name in apart)
    return usage["input_tokens"] + cached, usage["output_tokens"]


def cached_tokens(answer: Answer) -> int:
    """Return the tokens of a prompt that came from a cache, in the words of any format."""
    usage = answer.json()["usage"]
    for name in ("prompt_tokens_details", "input_tokens_details"):
        if details := usage.get(name):
            return int(details["cached_tokens"])
    return int(usage.get("cache_read_input_tokens", 0))


def chat_body(model: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return a minimal chat request."""
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}
