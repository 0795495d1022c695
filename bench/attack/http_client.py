"""A client that sends any bytes, and reads a response as it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import httptools

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
_LAST_EVENTS: Final = {
    MESSAGES: ("message_stop",),
    RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
}
"""Names of the events that end a stream, by path; Responses has a `[DONE]` behind them."""
_DONE: Final = b"data: [DONE]\n\n"
_READ_BYTES: Final = 1 << 16
_ANSWER_S: Final = 120.0
_UNREAD_BYTES: Final = 16 << 20
"""More than the buffers of two systems keep of a connection that was closed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; status 0 means that the connection ended without one."""

    status: int = 0
    body: bytes = b""
    complete: bool = False

    @property
    def code(self) -> str:
        """Return the code of an error in OpenAI's shape, or the type of one in Anthropic's."""
        try:
            answer = json.loads(self.body)
            error = answer["error"]
            if error.keys() == {"message", "type", "param", "code"}:
                return str(error["code"] or error["type"])
            if answer["type"] == "error" and error.keys() == {"message", "type"}:
                return str(error["type"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            pass
        return ""

    @property
    def streamed(self) -> bool:
        """Return whether the body is a stream of events, however odd its first lines are."""
        return not self.body.startswith((b"{", b"["))

    @property
    def stream_error(self) -> str:
        """Return the code of the error event that ends a stream, or an empty string."""
        body = self.body.removesuffix(_DONE).rstrip(b"\n")
        events = body.split(b"\n\n") if self.streamed else []
        for event in events[-2:]:  # the failed response comes behind its error
            name, _, data = event.rpartition(b"data: ")
            if b"event: error" in name or data.startswith(b'{"error":'):
                try:
                    answer = json.loads(data)
                except ValueError:
                    return "an error that is no JSON"
                return Answer(200, data).code or str(answer.get("code") or "untyped")
        return ""

    @property
    def done(self) -> bool:
        return self.body.endswith(_DONE)

    def ends_as(self, path: str) -> bool:
        """Return whether a stream ends as a complete one of this route."""
        if path not in _LAST_EVENTS:
            return self.done
        *_, event = self.body.removesuffix(_DONE).rstrip(b"\n").split(b"\n\n")
        return event.startswith(tuple(f"event: {name}".encode() for name in _LAST_EVENTS[path]))

    def problem(self, path: str) -> str:
        """Return what is wrong with the answer of an honest worker, or an empty string."""
        if self.status != 200:
            return ""
        if not self.streamed:
            return "" if self.is_json() else "a whole answer that is no JSON"
        if self.stream_error:
            return f"a stream that ends in {self.stream_error}"
        return "" if self.ends_as(path) else "a stream without an end"

    def json(self) -> Any:
        return json.loads(self.body.decode(), parse_constant=_reject)

    def is_json(self) -> bool:
        try:
            self.json()
        except ValueError:
            return False
        return True

    def tokens(self) -> tuple[int, int]:
        """Return the tokens of prompt and answer, in the words of any format."""
        usage = self.json()["usage"]
        if "prompt_tokens" in usage:
            return usage["prompt_tokens"], usage["completion_tokens"]
        # Anthropic counts them apart.
        apart = ("cache_read_input_tokens", "cache_creation_input_tokens")
        cached = sum(usage.get(name, 0) for name in apart)
        return usage["input_tokens"] + cached, usage["output_tokens"]


def _reject(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


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

    async def is_closed(self, within_s: float) -> bool:
        """Return whether the server closes the connection in time, with or without a reset.

        A server that goes on sending has not.
        """
        left = _UNREAD_BYTES
        try:
            async with asyncio.timeout(within_s):
                with contextlib.suppress(ConnectionError):
                    while left > 0 and (piece := await self.reader.read(1 << 20)):
                        left -= len(piece)
        except TimeoutError:
            return False
        return left > 0


@contextlib.asynccontextmanager
async def connection(
    port: int, *, limit: int = _READ_BYTES, system_bytes: int = 0
) -> AsyncIterator[Connection]:
    """Open a connection, and abort it at the end; `system_bytes` is what the system may read."""
    opened = socket.socket()
    opened.setblocking(False)
    try:
        if system_bytes:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, system_bytes)
        await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=opened, limit=limit)
    except BaseException:
        opened.close()
        raise
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


def chat_body(model: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def prompt_fields(path: str, text: str, tokens: int) -> dict[str, Any]:
    """Return the fields of a request with one text and so many tokens to answer, by its path."""
    messages = [{"role": "user", "content": text}]
    return {
        CHAT: {"messages": messages, "max_tokens": tokens},
        COMPLETIONS: {"prompt": text, "max_tokens": tokens},
        MESSAGES: {"messages": messages, "system": text[:9], "max_tokens": tokens},
        RESPONSES: {"input": text, "max_output_tokens": tokens, "store": False},
    }[path]
