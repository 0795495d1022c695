"""Connections to a worker on a real socket, and servers that send given pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.http.upstream import UpstreamConnection

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REQUEST = b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\n"
BODY = b"body"
TIMEOUT_S = 30.0
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n4;x=y\r\n two\r\n"
    b"0\r\ntrailer: x\r\n\r\n"
)
"""A complete answer 'one two', with a chunk extension and a trailer."""


@contextlib.asynccontextmanager
async def upstream_connection(
    serve: Serve,
) -> AsyncIterator[tuple[UpstreamConnection, list[UpstreamConnection]]]:
    """Yield a connection to a server, and the list of connections released for reuse."""
    released: list[UpstreamConnection] = []
    loop = asyncio.get_running_loop()
    served = asyncio.Event()

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        served.set()

    server = await asyncio.start_server(serve_and_close, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(loop, released.append), "127.0.0.1", port
        )
        try:
            yield connection, released
        finally:
            connection.abort()
            await asyncio.wait_for(served.wait(), TIMEOUT_S)


def serve_pieces(*pieces: bytes) -> Serve:
    """Answer each request with these pieces, one packet each, on the same connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(BODY):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)

    return serve


def serve_once(*pieces: bytes) -> Serve:
    """Answer one request with these pieces, and close the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.writelines(pieces)
        await writer.drain()

    return serve


async def send_request(connection: UpstreamConnection) -> UpstreamConnection:
    """Send a request, and return once the head of its response has come."""
    await connection.request(REQUEST, BODY, TIMEOUT_S)
    return connection
