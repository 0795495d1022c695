"""The bounds of a connection, at the port of a gateway and at that of a worker, without any key."""

import asyncio
import contextlib
import gc
import re
import resource
import socket
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from gateway.assembly import Timing
from paceline import http
from paceline.http import PIPELINE_LIMIT, TRAILERS_LIMIT, TRAILERS_LIMIT_BYTES, BoundedProtocol
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker

CHUNKED = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
_PIECES = 1000
OFTEN = Timing(check_s=0.05)
GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def read_to_end(self) -> bytes:
        """Read until the server closes the connection, with or without a reset."""
        received = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(10):  # less than the time for a body
                while piece := await self.reader.read(65536):
                    received += piece
        return received

    async def read_response(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        return int(head.split()[1]), head + await self.reader.readexactly(int(length[1]))


@pytest.fixture(params=["gateway", "worker"])
async def port(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[int]:
    """The port of a gateway, then that of a worker."""
    if request.param == "gateway":
        with RunningGateway(make_settings(tmp_path), OFTEN) as gateway:
            yield int(gateway.url.rpartition(":")[2])
    else:
        worker = make_worker(ScriptedEngine([]))
        async with serve_worker(worker, "token", check_s=OFTEN.check_s) as url:
            yield int(url.rpartition(":")[2])


@pytest.fixture
async def connection(port: int) -> AsyncIterator[Connection]:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield connection
    finally:
        connection.writer.close()


@pytest.mark.parametrize(
    "trailers",
    [
        b"0\r\n" + b"a: b\r\n" * (TRAILERS_LIMIT + 2),  # a header ends where the next begins
        b"0\r\na: " + b"b" * TRAILERS_LIMIT_BYTES + b"\r\n",
        b"0\r\n" + b"a" * (TRAILERS_LIMIT_BYTES + 1),
        b"1;x=" + b"y" * (TRAILERS_LIMIT_BYTES + 1),
    ],
    ids=["many", "long", "endless", "extension of a chunk"],
)
async def test_c1_a_connection_with_too_many_trailers_is_closed(connection, trailers) -> None:
    await connection.send(CHUNKED)
    status, _ = await connection.read_response()
    assert 400 <= status < 500
    await connection.send(trailers)
    assert await connection.read_to_end() == b""


async def test_c1_c13_a_few_trailers_are_served_and_are_no_headers(connection: Connection) -> None:
    trailers = b"x-request-id: from-a-trailer\r\nhost: evil.example\r\nauthorization: Bearer x\r\n"
    trailers += b"a: b\r\n" * (TRAILERS_LIMIT - 3) + b"\r\n"
    await connection.send(CHUNKED + b"1\r\nx\r\n0\r\n" + trailers + GET)
    status, response = await connection.read_response()
    assert status != 421
    assert b"from-a-trailer" not in response
    status, _ = await connection.read_response()
    assert status == 200


async def test_c2_all_of_many_pipelined_requests_are_answered_in_order(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PIPELINE_PAUSE_S", 0)
    get = GET.replace(b"host:", b"x: " + b"y" * 2000 + b"\r\nhost:")
    chat = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
    requests = [get, chat] * 300  # more bytes than one read of the server
    sending = asyncio.create_task(connection.send(b"".join(requests)))
    for request in requests:
        status, _ = await connection.read_response()
        assert (status == 200) == (request == get)
    await sending


async def test_c2_a_pipelined_request_waits_while_others_are_behind_it(
    connection: Connection, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "PIPELINE_PAUSE_S", 3600)
    await connection.send(GET * 3)
    assert (await connection.read_response())[0] == 200
    for _ in range(3):  # each needs more iterations of the loop than one that waits for nothing
        other = Connection(*await asyncio.open_connection("127.0.0.1", port))
        await other.send(GET * 2)
        assert [(await other.read_response())[0] for _ in range(2)] == [200, 200]
        other.writer.close()
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0):
            await connection.reader.readuntil(b"\r\n\r\n")


async def test_c2_the_empty_lines_of_a_body_are_no_ends_of_heads(connection, monkeypatch) -> None:
    """To parse up to each takes 1.5 s for 32 MB."""
    fed: list[int] = []
    feed = BoundedProtocol._feed

    def counted(self: BoundedProtocol, data: bytes) -> None:
        fed.append(len(data))
        feed(self, data)

    monkeypatch.setattr(BoundedProtocol, "_feed", counted)
    body = b"\r\n\r\n" * 250_000
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000"
    await connection.send(head + b"\r\n\r\n" + body + GET * 3)
    assert (await connection.read_response())[0] in (400, 401)
    assert [(await connection.read_response())[0] for _ in range(3)] == [200] * 3
    assert len(fed) < 200


async def test_c9_a_connection_whose_body_does_not_end_after_the_response_is_closed(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2026-9540: resources of a request that are not released."""
    monkeypatch.setattr(http, "_BODY_AFTER_RESPONSE_S", 0.2)
    await connection.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nx")
    status, _ = await connection.read_response()
    assert status == 200
    assert await connection.read_to_end() == b""


@pytest.mark.parametrize("pipelined", [0, 3])
async def test_c9_the_memory_of_a_lost_connection_waits_for_no_garbage_collector(
    port: int, monkeypatch: pytest.MonkeyPatch, pipelined: int
) -> None:
    """The collector runs seldom in a gateway; half-read bodies took 12 kB each until then."""

    made: list[weakref.ref[BoundedProtocol]] = []
    connection_made = BoundedProtocol.connection_made

    def watch(protocol: BoundedProtocol, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(protocol))
        connection_made(protocol, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", watch)
    monkeypatch.setattr(http, "_BODY_AFTER_RESPONSE_S", 0.2)
    gc.disable()
    try:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        await connection.send(GET * pipelined + CHUNKED + b"1\r\nx\r\n")
        await connection.read_to_end()
        connection.writer.close()
        assert len(made) == 1
        await asyncio.to_thread(wait_until, lambda: made[0]() is None)
    finally:
        gc.enable()


async def test_c9_the_system_probes_clients_that_may_have_vanished() -> None:
    responded = asyncio.Event()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await responded.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = http.Server(app)
        async with server.on(listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(GET)
            while not server.server_state.tasks:
                await asyncio.sleep(0)
            (connection,) = server.server_state.connections
            client = connection.transport.get_extra_info("socket")
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 4
            writer.close()
            responded.set()


async def test_c10_a_head_without_end_is_a_431(connection: Connection) -> None:
    await connection.send(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 40_000)
    assert b"headers_too_large" in await connection.read_to_end()


async def test_c2_sixteen_requests_of_a_connection_are_parsed_ahead() -> None:
    async def slow_app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        await asyncio.sleep(60)

    protocol = BoundedProtocol(
        config=Config(slow_app),
        server_state=ServerState(),
        app_state={},
        head_timeout_s=10,
        write_timeout_s=10,
    )
    transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
    protocol.connection_made(transport)
    try:
        # In pieces that end within a head, and in one.
        for piece in (GET[:-2], GET[-2:] + GET[:-2], (GET[-2:] + GET[:-2]) * 7000):
            protocol.data_received(piece)
        assert PIPELINE_LIMIT - 1 <= len(protocol.pipeline) <= PIPELINE_LIMIT
        transport.pause_reading.assert_called()
        transport.resume_reading.assert_not_called()
    finally:
        for task in protocol.tasks:
            task.cancel()


async def test_a8_a_response_waits_for_its_reader_although_it_awaits_nothing_else() -> None:
    """All its pieces are there, as those of a log that is followed."""
    sent = 0

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < _PIECES:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            sent += 1

    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with http.Server(endless, check_s=60.0).on(listener):
            client = Connection(*await asyncio.open_connection(*listener.getsockname(), limit=1))
            await client.send(GET)
            await client.reader.readexactly(12)
            for _ in range(100):  # iterations of the event loop, in which nobody reads
                await asyncio.sleep(0)
            client.writer.transport.abort()
            assert 0 < sent < _PIECES


def test_a_server_may_open_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
    try:
        http.raise_open_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1]
        assert soft == min(http.OPEN_FILES, hard if hard != resource.RLIM_INFINITY else soft)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
