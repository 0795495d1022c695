"""A connection to a worker over a real socket: parsing, reuse, timeouts and relayed chunks."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from random import Random

import pytest

from gateway.http import upstream
from gateway.http.upstream import (
    HEAD_LIMIT_BYTES,
    TURN_BYTES,
    ConnectionLost,
    ConnectionPool,
    ReadTimeout,
    UpstreamConnection,
)
from tests.support.http_server import Serve, serve_streams

REQUEST = b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\n"
BODY = b"body"
TIMEOUT_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
CHUNKED = HEAD + b"3\r\none\r\n4;x=y\r\n two\r\n0\r\ntrailer: x\r\n\r\n"
"""A complete answer 'one two', with a chunk extension and a trailer."""


@contextlib.asynccontextmanager
async def connected(
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

    async with serve_streams(serve_and_close) as port:
        _, connection = await loop.create_connection(
            lambda: UpstreamConnection(
                loop, released.append, lambda one: loop.call_soon(one.take_turn)
            ),
            "127.0.0.1",
            port,
        )
        try:
            yield connection, released
        finally:
            connection.abort()
            await asyncio.wait_for(served.wait(), TIMEOUT_S)


async def until_paused(connection: UpstreamConnection) -> None:
    """Wait until backpressure stops the worker."""
    async with asyncio.timeout(TIMEOUT_S):
        while not connection._paused:
            await asyncio.sleep(0.001)


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
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.writelines(pieces)
        await writer.drain()

    return serve


async def send_request(connection: UpstreamConnection) -> UpstreamConnection:
    """Send a request, and return once the head of its response has come."""
    await connection.request(REQUEST, (BODY,), TIMEOUT_S)
    return connection


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
async def test_a_response_is_parsed_at_any_split(step: int) -> None:
    parts = [CHUNKED[at : at + step] for at in range(0, len(CHUNKED), step)]
    async with connected(serve_pieces(*parts)) as (connection, reusable):
        for _ in range(2):
            response = await send_request(connection)
            assert (response.status, await response.read()) == (200, b"one two")
            response.release()
    assert reusable == [connection, connection]
    assert connection.used


async def test_informational_responses_are_skipped() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    late = b"HTTP/1.1 429 No\r\nRetry-After: 7\r\ncontent-length: 2\r\n\r\nno"
    for parts in ((early, late), (early + late,)):
        async with connected(serve_pieces(*parts)) as (connection, reusable):
            response = await send_request(connection)
            assert (response.status, response.retry_after) == (429, "7")
            assert await response.read() == b"no"
            response.release()
            assert reusable


async def test_an_http_1_0_response_ends_with_the_connection() -> None:
    whole = serve_once(b"HTTP/1.0 200 OK\r\n\r\nall ", b"of it")
    async with connected(whole) as (connection, reusable):
        response = await send_request(connection)
        assert await response.read() == b"all of it"
        response.release()
    assert not reusable


async def test_headers_in_many_parts_are_limited() -> None:
    header = b"x: " + b"y" * 4091 + b"\r\n"
    status, headers = b"HTTP/1.1 200 OK\r\n", [header] * (HEAD_LIMIT_BYTES // len(header))
    async with connected(serve_pieces(status, *headers)) as (connection, _):
        with pytest.raises(ConnectionLost, match="the head of the response is too long"):
            await send_request(connection)
    async with connected(serve_pieces(status, *headers[1:], b"\r\n")) as (connection, _):
        assert (await send_request(connection)).status == 200


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
EVIL = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"


@pytest.mark.parametrize("parts", [(OK, EVIL), (OK + EVIL,)])
async def test_unsolicited_bytes_close_the_connection(parts: tuple[bytes, ...]) -> None:
    async with connected(serve_pieces(*parts)) as (connection, _):
        response = await send_request(connection)
        assert await response.read() == b"ok"
        response.release()
        async with asyncio.timeout(TIMEOUT_S):
            while connection.open:
                await asyncio.sleep(0.001)
        with pytest.raises(ConnectionLost):
            await send_request(connection)


async def test_closing_a_response_early_closes_the_connection() -> None:
    disconnected = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.write(CHUNKED[:60])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        disconnected.set()

    async with connected(serve) as (connection, reusable):
        (await send_request(connection)).release()
        await asyncio.wait_for(disconnected.wait(), TIMEOUT_S)
    assert not reusable


async def test_after_a_response_to_a_half_sent_request_the_connection_is_not_reused() -> None:
    received = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await received.wait()

    async with connected(serve) as (connection, reusable):
        await connection.request(REQUEST, (b"x" * 16_000_000,), TIMEOUT_S)
        assert (connection.status, await connection.read()) == (413, b"")
        connection.release()
        received.set()
    assert not reusable


async def test_the_read_timeout_applies_to_each_read_and_not_to_the_response() -> None:
    now_s = asyncio.get_running_loop().time
    slow = serve_pieces(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", *[b"x"] * 40)
    async with connected(slow) as (connection, _):
        response = await send_request(connection)
        response.set_read_timeout(9.0)
        began_s, received = now_s(), bytearray()

        async def receive() -> None:
            while part := await response.chunk():
                received.extend(part)

        receiving = asyncio.create_task(receive())
        async with asyncio.timeout(TIMEOUT_S):
            while len(received) < 40:
                await asyncio.sleep(0.001)
        connection.check(began_s + 9.0)
        await asyncio.sleep(0)
        assert not receiving.done()
        connection.check(now_s() + 9.0)
        with pytest.raises(ReadTimeout):
            await receiving


async def test_backpressure_pauses_a_worker_that_is_faster_than_its_reader() -> None:
    sent_bytes = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await reader.readuntil(BODY)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent_bytes += 100_000

    async with connected(serve) as (connection, _):
        response = await send_request(connection)
        await until_paused(connection)
        assert sent_bytes < 50_000_000, "only socket buffers are in transit"
        read_bytes = 0
        while part := await response.chunk():
            read_bytes += len(part)
        assert read_bytes == 100_000_000


async def test_a_paused_connection_reads_again_for_the_next_request() -> None:
    async with connected(serve_pieces(CHUNKED)) as (connection, reusable):
        response = await send_request(connection)
        assert await response.read() == b"one two"
        connection.pause(True)  # as the last chunk does when the client is slow
        response.release()
        assert reusable == [connection]
        response = await send_request(connection)
        assert await asyncio.wait_for(response.read(), TIMEOUT_S) == b"one two"


async def test_a_pause_caused_by_a_relayed_chunk_is_no_read_timeout() -> None:
    second = b"3\r\ntwo\r\n"
    pieces = (HEAD + b"3\r\none\r\n", second, END)
    async with connected(serve_pieces(*pieces)) as (connection, reusable):
        response = await send_request(connection)
        relayed: list[bytes] = []

        def relay(chunk: bytes) -> bool:
            relayed.append(chunk)
            connection.pause(True)
            connection.check(asyncio.get_running_loop().time() + TIMEOUT_S)
            asyncio.get_running_loop().call_soon(connection.pause, False)
            return True

        assert await connection.pour(lambda _: True, relay) == b""
        response.release()
    assert relayed == [second]
    assert reusable == [connection]


FLOOD = b"".join(b"%x\r\n%b\r\n" % (size, b"x" * size) for size in range(1, 500))
"""Chunks, more at once than a turn takes."""
FLOOD_BYTES = sum(range(1, 500))


async def test_f87_streams_that_bring_much_at_once_take_turns(monkeypatch) -> None:
    """So the request of another client waits for few of them in each iteration of the loop."""
    monkeypatch.setattr(upstream, "TURN_S", 0)
    taken = [0]
    """Bytes by the iteration."""
    received = Counter[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.writelines((HEAD, FLOOD, END))
        await writer.drain()
        writer.close()

    async def count_iterations() -> None:
        while True:
            taken.append(0)
            await asyncio.sleep(0)

    async def pour(number: int) -> None:
        def take(piece: bytes) -> bool:
            if received[number]:  # behind what came with the head
                taken[-1] += len(piece)
            received[number] += len(piece)
            return True

        response = await pool.send(url, (b"",), {}, lambda: None)
        last = await response.pour(take)
        received[number] += len(last)
        response.release()

    async with serve_streams(serve) as port, ConnectionPool(TIMEOUT_S, TIMEOUT_S) as pool:
        url = f"http://127.0.0.1:{port}/"
        counting = asyncio.create_task(count_iterations())
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*map(pour, range(12)))
        counting.cancel()
    assert received == dict.fromkeys(range(12), FLOOD_BYTES)
    assert max(taken) <= 4 * TURN_BYTES


async def test_f87_a_stream_that_brings_much_at_once_stays_whole_beside_pauses_and_its_end() -> (
    None
):
    # Ends where the bytes of one turn do.
    filler = b"x" * (64 * 1024 - len(HEAD) - len(b"ffff\r\n\r\n") - len(END))
    exact = b"%x\r\n%b\r\n" % (len(filler), filler)
    for chunks, size, behind in (
        (FLOOD, FLOOD_BYTES, b""),
        (FLOOD, FLOOD_BYTES, EVIL),
        (exact, len(filler), EVIL),
    ):
        reused = not behind
        async with connected(serve_pieces(HEAD + chunks + END + behind)) as (connection, reusable):
            response, received = await send_request(connection), bytearray()

            def take(piece: bytes, into=received, of=connection) -> bool:
                into += piece
                of.pause(True)
                of.check(asyncio.get_running_loop().time() + TIMEOUT_S)
                asyncio.get_running_loop().call_soon(of.pause, False)
                return True

            received += await asyncio.wait_for(response.pour(take), TIMEOUT_S)
            assert len(received) == size
            response.release()
            assert (reusable == [connection]) is reused
            assert connection.open is reused


async def test_f87_what_came_before_the_connection_is_lost_stays_whole() -> None:
    """TLS reports the end of a connection also while its reading is paused."""

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(serve) as (connection, _):
        asking = asyncio.create_task(send_request(connection))
        await asyncio.sleep(0)
        connection.data_received(HEAD + FLOOD + END)
        connection.connection_lost(None)
        response = await asking
        assert len(await response.read()) == FLOOD_BYTES


class Sink:
    """A sink for up to a number of parts, and for a share of the chunks offered to it."""

    def __init__(self, share: float = 1.0, limit: int = 0, random: Random | None = None) -> None:
        self.relayed: list[bytes] = []
        self.parts: list[bytes] = []
        self._share, self._limit, self._random = share, limit, random or Random(0)

    def data(self, data: bytes) -> bool:
        self.parts.append(data)
        return len(self.parts) != self._limit

    def chunk(self, chunk: bytes) -> bool:
        accepts = self._random.random() < self._share
        if accepts:
            self.relayed.append(chunk)
            size, _, rest = chunk.partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2
            self.parts.append(rest[:-2])
        return accepts

    async def read(self, connection: UpstreamConnection) -> bytes:
        """Pour a response; return the bytes that came with its end."""
        response = await send_request(connection)
        try:
            return await response.pour(self.data, self.chunk)
        finally:
            response.release()


async def poured(sink: Sink, serve: Serve) -> tuple[bytes, bool]:
    """Return the body of a response, and whether its connection is reused."""
    async with connected(serve) as (connection, reusable):
        last = await sink.read(connection)
        return b"".join((*sink.parts, last)), reusable == [connection]


async def test_complete_chunks_are_relayed_unchanged_and_the_response_continues() -> None:
    words = (b"5\r\nfirst\r\n", b"3\r\none\r\n", b"B\r\n, and two!!\r\n", b"2\r\n..\r\n")
    relay, pieces = Sink(), (HEAD + words[0], *words[1:], END)
    async with connected(serve_pieces(*pieces)) as (connection, reusable):
        for number in (1, 2):
            last = await relay.read(connection)
            assert b"".join((*relay.parts, last)) == b"firstone, and two!!.." * number
    assert relay.relayed == [*words[1:], *words[1:]]
    assert reusable == [connection, connection]


@pytest.mark.parametrize("seed", range(8))
async def test_a_response_is_the_same_at_any_split_with_any_chunks_relayed(seed: int) -> None:
    random = Random(seed)
    words = [bytes(random.choices(b"0123\r\n: abc", k=random.randint(1, 12))) for _ in range(60)]
    framed = [b"%x\r\n%b\r\n" % (len(word), word) for word in words]
    parts = [HEAD + framed[0]]
    for chunk in framed[1:]:
        match random.randrange(4):
            case 0:  # together with the previous chunk
                parts[-1] += chunk
            case 1:  # in two
                cut = random.randrange(1, len(chunk))
                parts += [chunk[:cut], chunk[cut:]]
            case _:
                parts.append(chunk)
    relay = Sink(share=0.5, random=random)
    assert await poured(relay, serve_pieces(*parts, END)) == (b"".join(words), True)
    assert relay.relayed


ABC = b"3\r\nabc\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        (b"10\r\n", ABC, ABC + b"\r\n"),  # the data of a chunk looks like chunks
        (b"3;x=y\r\nabc\r\n",),
        (b"0003\r\nabc\r\n",),
        (ABC + ABC,),
        (ABC[:-1], b"\n"),
        (b"1", ABC, b"fourteen bytes\r\n"),  # the rest of a size looks like a size
    ],
)
async def test_only_a_single_complete_plain_chunk_is_offered(parts: tuple[bytes, ...]) -> None:
    relay = Sink()
    _, reused = await poured(relay, serve_pieces(HEAD + b"2\r\nok\r\n", *parts, END))
    assert (relay.relayed, reused) == ([], True)


async def test_no_chunk_is_relayed_after_the_last_one_or_within_a_content_length() -> None:
    for pieces, expected in (
        ((HEAD, b"2\r\nok\r\n" + END + ABC, ABC), (b"ok", False)),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n", ABC, ABC), (ABC + ABC, True)),
    ):
        relay = Sink()
        assert await poured(relay, serve_pieces(*pieces)) == expected
        assert not relay.relayed


async def test_the_bytes_that_come_with_the_end_are_returned() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"
    for pieces, least, whole in (
        ((head + b"on", b"e ", b"tw"), b"tw", b"one tw"),
        ((CHUNKED,), b"one two", b"one two"),
    ):
        sink = Sink()
        async with connected(serve_pieces(*pieces)) as (connection, _):
            last = await sink.read(connection)
        assert last.endswith(least)
        assert b"".join((*sink.parts, last)) == whole


async def test_a_sink_at_its_limit_gets_no_more_bytes() -> None:
    sink = Sink(share=0, limit=1)
    endless = serve_pieces(CHUNKED[:60], b"1\r\n!\r\n" * 20)
    _, reused = await poured(sink, endless)
    assert (len(sink.parts), reused) == (1, False)


async def test_a_cut_response_is_written_up_to_the_cut() -> None:
    sink = Sink()
    with pytest.raises(ConnectionLost):
        await poured(sink, serve_once(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart"))
    assert b"".join(sink.parts) == b"part"


async def test_bytes_received_before_pour_are_written_first() -> None:
    size = 1_000_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    sink = Sink()
    async with connected(serve_pieces(head + b"x" * size)) as (connection, reusable):
        response = await send_request(connection)
        await until_paused(connection)
        last = await response.pour(sink.data, sink.chunk)
        response.release()
    assert sum(map(len, sink.parts)) + len(last) == size
    assert reusable == [connection]


async def test_a_paused_connection_has_no_read_timeout() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
    sink = Sink()
    async with connected(serve_pieces(head, b"on", b"e!")) as (connection, reusable):
        response = await send_request(connection)
        pouring = asyncio.create_task(response.pour(sink.data, sink.chunk))
        await asyncio.sleep(0)
        response.pause(True)
        connection.check(asyncio.get_running_loop().time() + TIMEOUT_S)
        response.pause(False)
        last = await pouring
        response.release()
    assert b"".join(sink.parts) + last == b"one!"
    assert reusable == [connection]
