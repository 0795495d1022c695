"""An HTTP/1.x server that sends given bytes, also those that a framework would not send."""

import asyncio
import contextlib
import json
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")


class ServerConnection(asyncio.StreamReaderProtocol):
    """A connection of a client: its requests one after another, and the bytes of the answers."""

    def __init__(self, answer: Callable[["ServerConnection", Request], Awaitable[None]]) -> None:
        self._answer = answer
        self.request_count = 0
        """Requests of this connection, including the current one."""
        self.client_closed = asyncio.Event()
        """The client closed the connection."""
        self.closed = False
        self._chunked = False
        self._made: asyncio.BaseTransport | None = None
        super().__init__(asyncio.StreamReader(), self._serve)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Without it, a body after its head waits 40 ms for the acknowledgement of the head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._made = transport
        super().connection_made(transport)

    def eof_received(self) -> bool:
        self.client_closed.set()
        return bool(super().eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.client_closed.set()
        super().connection_lost(exc)

    async def send_head(
        self, status: int, headers: Headers, *, length: int | None, http_1_0: bool = False
    ) -> None:
        """Send the head; a body without a length is chunked, or ends with the connection."""
        self._chunked = length is None and not http_1_0
        framing = [(b"content-length", b"%d" % length)] if length is not None else []
        if self._chunked:
            framing = [(b"transfer-encoding", b"chunked")]
        lines = [b"HTTP/1.%d %d status" % (0 if http_1_0 else 1, status)]
        lines += [name + b": " + value for name, value in (*headers, *framing)]
        await self.send(b"\r\n".join(lines) + b"\r\n\r\n")

    async def send_body(self, piece: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)

    async def end_body(self) -> None:
        """End a body of unknown length."""
        if self._chunked:
            await self.send(b"0\r\n\r\n")
        else:
            self.close()

    async def send(self, raw: bytes) -> None:
        """Send bytes unchanged, and let the loop transmit them before the next ones."""
        self._writer.write(raw)
        await self._writer.drain()
        await asyncio.sleep(0)

    def close(self) -> None:
        """Close the connection after the sent bytes."""
        if self._made is not None:
            self._made.close()

    def abort(self) -> None:
        """Close the connection with a reset."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self._writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                request = await _read(reader)
                self.request_count += 1
                await self._answer(self, request)
        writer.close()


@contextlib.asynccontextmanager
async def serve_connections(
    listener: socket.socket, answer: Callable[[ServerConnection, Request], Awaitable[None]]
) -> AsyncIterator[None]:
    """Serve connections of a listening socket; close open ones at the end of the context."""
    connections: weakref.WeakSet[ServerConnection] = weakref.WeakSet()

    def make_connection() -> ServerConnection:
        connection = ServerConnection(answer)
        connections.add(connection)
        return connection

    loop = asyncio.get_running_loop()
    server = await loop.create_server(make_connection, sock=listener, backlog=1024)
    try:
        yield
    finally:
        await close_server(server)
        for connection in tuple(connections):
            if not connection.closed:
                connection.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def serve_streams(
    serve: Serve, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve connections, each by one call, which closes it; yield the port."""
    server = await asyncio.start_server(serve, host, port, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        await close_server(server)


async def close_server(server: asyncio.Server) -> None:
    """Close a server that may be accepting a connection.

    asyncio loses a connection that it has accepted when the server closes: the server accepts no
    more, and makes those first.
    """
    for listener in server.sockets:
        server.get_loop().remove_reader(listener)
    for _ in range(5):
        await asyncio.sleep(0)
    server.close()


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    pairs = (line.split(":", 1) for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method=method, path=path, headers=headers, body=body)
