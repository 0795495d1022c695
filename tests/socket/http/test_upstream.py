"""One connection to a worker, over a real socket: whose bytes are whose, and when it is kept.

HTTP chunks of an answer that pass as they came, over a real socket.

An answer that is poured into a sink as it comes, over a real socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest

from gateway.http.upstream import HEAD_LIMIT_BYTES, ConnectionLost, ReadTimeout, UpstreamConnection
from tests.support.upstream_connections import (
    BODY,
    CHUNKED,
    REQUEST,
    TIMEOUT_S,
    send_request,
    serve_once,
    serve_pieces,
    upstream_connection,
)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
async def test_an_answer_is_the_same_however_it_is_split(step: int) -> None:
    pieces = [CHUNKED[at : at + step] for at in range(0, len(CHUNKED), step)]
    async with upstream_connection(serve_pieces(*pieces)) as (link, kept):
        for _ in range(2):
            response = await send_request(link)
            assert (response.status, await response.read()) == (200, b"one two")
            response.close()
    assert kept == [link, link]
    assert link.used


async def test_what_comes_before_the_answer_is_not_the_answer() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    late = b"HTTP/1.1 429 No\r\nRetry-After: 7\r\ncontent-length: 2\r\n\r\nno"
    for pieces in ((early, late), (early + late,)):
        async with upstream_connection(serve_pieces(*pieces)) as (link, kept):
            response = await send_request(link)
            assert (response.status, response.retry_after) == (429, "7")
            assert await response.read() == b"no"
            response.close()
            assert kept


async def test_http_1_0_ends_its_answer_with_the_connection() -> None:
    async with upstream_connection(serve_once(b"HTTP/1.0 200 OK\r\n\r\nall ", b"of it")) as (
        link,
        kept,
    ):
        response = await send_request(link)
        assert await response.read() == b"all of it"
        response.close()
    assert not kept


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n",
    ],
)
async def test_a_cut_answer_gives_what_came_and_then_the_loss(cut: bytes) -> None:
    async with upstream_connection(serve_once(cut)) as (link, kept):
        response = await send_request(link)
        assert await response.chunk() == b"part"
        with pytest.raises(ConnectionLost):
            await response.chunk()
        response.close()
    assert not kept


@pytest.mark.parametrize(
    "nonsense",
    [
        b"<html>\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_LIMIT_BYTES,
        b"",
    ],
    ids=["html", "upgrade", "length", "long", "nothing"],
)
async def test_what_is_no_answer_is_a_loss(nonsense: bytes) -> None:
    async with upstream_connection(serve_once(nonsense)) as (link, _):
        with pytest.raises(ConnectionLost):
            await send_request(link)
        assert link.received == bool(nonsense)


async def test_a_head_is_bounded_in_however_many_pieces_it_comes() -> None:
    line = b"x: " + b"y" * 4091 + b"\r\n"
    status, lines = b"HTTP/1.1 200 OK\r\n", [line] * (HEAD_LIMIT_BYTES // len(line))
    async with upstream_connection(serve_pieces(status, *lines)) as (link, _):
        with pytest.raises(ConnectionLost, match="the head of the response is too long"):
            await send_request(link)
    async with upstream_connection(serve_pieces(status, *lines[1:], b"\r\n")) as (link, _):
        assert (await send_request(link)).status == 200


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
EVIL = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"


@pytest.mark.parametrize("pieces", [(OK, EVIL), (OK + EVIL,)])
async def test_bytes_that_nobody_asked_for_end_the_connection(pieces: tuple[bytes, ...]) -> None:
    async with upstream_connection(serve_pieces(*pieces)) as (link, _):
        response = await send_request(link)
        assert await response.read() == b"ok"
        response.close()
        async with asyncio.timeout(TIMEOUT_S):
            while link.open:
                await asyncio.sleep(0.001)
        with pytest.raises(ConnectionLost):
            await send_request(link)


async def test_an_answer_left_early_ends_the_connection() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.write(CHUNKED[:60])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with upstream_connection(serve) as (link, kept):
        (await send_request(link)).close()
        await asyncio.wait_for(left.wait(), TIMEOUT_S)
    assert not kept


async def test_an_answer_before_the_request_was_read_is_taken_and_the_connection_is_not_kept() -> (
    None
):
    answered = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await answered.wait()

    async with upstream_connection(serve) as (link, kept):
        response = await link.request(REQUEST, b"x" * 50_000_000, TIMEOUT_S)
        assert (response.status, await response.read()) == (413, b"")
        response.close()
        answered.set()
    assert not kept


async def test_each_wait_is_bounded_and_not_the_whole() -> None:
    slow = serve_pieces(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", *[b"x"] * 40)
    async with upstream_connection(slow) as (link, _):
        response = await send_request(link)
        response.set_read_timeout(0.5)
        received = bytearray()

        async def receive() -> None:
            while part := await response.chunk():
                received.extend(part)

        with pytest.raises(ReadTimeout):
            await receive()
        assert received == b"x" * 40


async def test_a_worker_that_is_faster_than_its_reader_waits() -> None:
    sent_bytes = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        await reader.readuntil(BODY)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent_bytes += 100_000

    async with upstream_connection(serve) as (link, _):
        response = await send_request(link)
        before = -1
        while sent_bytes != before:  # until it can send no more
            before = sent_bytes
            await asyncio.sleep(0.2)
        assert sent_bytes < 50_000_000, "what is under way is what sockets hold"
        assert len(await response.read()) == 100_000_000


async def test_a_connection_whose_last_reader_was_slow_reads_for_the_next() -> None:
    async with upstream_connection(serve_pieces(CHUNKED)) as (link, kept):
        response = await send_request(link)
        assert await response.read() == b"one two"
        link.pause(True)  # as the last piece does that its client cannot take at once
        response.close()
        assert kept == [link]
        assert await asyncio.wait_for((await send_request(link)).read(), TIMEOUT_S) == b"one two"


async def test_a_reader_that_is_pressed_by_a_passing_chunk_is_no_silence_of_the_worker() -> None:
    head, first, second, end = (
        CHUNKED.partition(b"3\r\n")[0],
        b"3\r\none\r\n",
        b"3\r\ntwo\r\n",
        b"0\r\n\r\n",
    )
    async with upstream_connection(serve_pieces(head + first, second, end)) as (link, kept):
        response = await send_request(link)
        link.set_read_timeout(0.1)
        passed: list[bytes] = []

        def through(chunk: bytes) -> bool:
            passed.append(chunk)
            link.pause(True)
            asyncio.get_running_loop().call_later(0.4, link.pause, False)
            return True

        assert await link.pour(lambda _: True, through) == b""
        response.close()
    assert passed == [second]
    assert kept == [link]


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Taker:
    """Takes pieces, and those of the chunks offered to it that it is told to."""

    def __init__(self, takes: bool = True, random: Random | None = None) -> None:
        self.passed: list[bytes] = []
        self.content: list[bytes] = []
        self._takes = takes
        self._random = random

    def piece(self, piece: bytes) -> bool:
        self.content.append(piece)
        return True

    def chunk(self, chunk: bytes) -> bool:
        takes = self._random.random() < 0.5 if self._random else self._takes
        if takes:
            self.passed.append(chunk)
            size, _, rest = chunk.partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2
            self.content.append(rest[:-2])
        return takes

    async def poured_from(self, link: UpstreamConnection) -> bytes:
        """Ask, and return all of the answer."""
        response = await send_request(link)
        try:
            last = await response.pour(self.piece, self.chunk)
        finally:
            response.close()
        return b"".join((*self.content, last))


async def test_whole_chunks_pass_as_they_came_and_the_answer_goes_on_behind_them() -> None:
    words = (b"5\r\nfirst\r\n", b"3\r\none\r\n", b"B\r\n, and two!!\r\n", b"2\r\n..\r\n")
    taker = Taker()
    async with upstream_connection(serve_pieces(HEAD + words[0], *words[1:], END)) as (link, kept):
        for number in (1, 2):
            told = await taker.poured_from(link)
            assert told == b"firstone, and two!!.." * number
    assert taker.passed == [*words[1:], *words[1:]]
    assert kept == [link, link]


async def test_a_chunk_that_is_not_taken_comes_as_a_piece() -> None:
    taker = Taker(takes=False)
    async with upstream_connection(serve_pieces(HEAD + b"3\r\none\r\n", b"4\r\n two\r\n", END)) as (
        link,
        kept,
    ):
        assert await taker.poured_from(link) == b"one two"
    assert kept == [link]


@pytest.mark.parametrize("seed", range(8))
async def test_an_answer_is_the_same_however_it_is_split_and_whatever_passes(seed: int) -> None:
    random = Random(seed)
    words = [bytes(random.choices(b"0123\r\n: abc", k=random.randint(1, 12))) for _ in range(60)]
    framed = [b"%x\r\n%b\r\n" % (len(word), word) for word in words]
    pieces = [HEAD + framed[0]]
    for chunk in framed[1:]:
        match random.randrange(4):
            case 0:  # with what came before
                pieces[-1] += chunk
            case 1:  # in two
                cut = random.randrange(1, len(chunk))
                pieces += [chunk[:cut], chunk[cut:]]
            case _:
                pieces.append(chunk)
    taker = Taker(random=random)
    async with upstream_connection(serve_pieces(*pieces, END)) as (link, kept):
        assert await taker.poured_from(link) == b"".join(words)
    assert taker.passed
    assert kept == [link]


@pytest.mark.parametrize(
    "pieces",
    [
        (b"10\r\n", b"3\r\nabc\r\n", b"3\r\nabc\r\n\r\n"),  # the words of a chunk look like chunks
        (b"3;x=y\r\nabc\r\n",),
        (b"0003\r\nabc\r\n",),
        (b"3\r\nabc\r\n3\r\nabc\r\n",),
        (b"3\r\nabc\r", b"\n"),
        (b"1", b"3\r\nabc\r\n", b"fourteen bytes\r\n"),  # the rest of a size looks like one
    ],
)
async def test_what_is_not_one_whole_plain_chunk_is_not_offered(pieces: tuple[bytes, ...]) -> None:
    taker = Taker()
    async with upstream_connection(serve_pieces(HEAD + b"2\r\nok\r\n", *pieces, END)) as (
        link,
        kept,
    ):
        await taker.poured_from(link)
    assert not taker.passed
    assert kept == [link]


async def test_nothing_passes_behind_the_end() -> None:
    taker = Taker()
    end = b"2\r\nok\r\n" + END
    async with upstream_connection(serve_pieces(HEAD, end + b"3\r\nabc\r\n", b"3\r\nabc\r\n")) as (
        link,
        kept,
    ):
        assert await taker.poured_from(link) == b"ok"
    assert not taker.passed
    assert not kept


async def test_a_body_that_is_not_chunked_never_passes_as_chunks() -> None:
    taker = Taker()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n"
    async with upstream_connection(serve_pieces(head, b"3\r\nabc\r\n", b"3\r\nabc\r\n")) as (
        link,
        kept,
    ):
        assert await taker.poured_from(link) == b"3\r\nabc\r\n" * 2
    assert not taker.passed
    assert kept == [link]


class Sink:
    """Takes up to a number of pieces."""

    def __init__(self, wanted: int | None = None) -> None:
        self.taken: list[bytes] = []
        self._wanted = wanted

    def __call__(self, piece: bytes) -> bool:
        self.taken.append(piece)
        return len(self.taken) != self._wanted


async def poured(link: UpstreamConnection, sink: Sink) -> bytes:
    """Ask, and return what came with the end."""
    response = await send_request(link)
    try:
        return await response.pour(sink)
    finally:
        response.close()


async def test_an_answer_is_poured_as_it_comes_and_what_came_with_the_end_is_left() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"
    sink = Sink()
    async with upstream_connection(serve_pieces(head + b"on", b"e ", b"tw")) as (link, kept):
        last = await poured(link, sink)
    assert b"".join(sink.taken) + last == b"one tw"
    assert last.endswith(b"tw")
    assert kept == [link]


async def test_an_answer_of_one_packet_is_all_left() -> None:
    sink = Sink()
    async with upstream_connection(serve_pieces(CHUNKED)) as (link, kept):
        assert await poured(link, sink) == b"one two"
    assert (sink.taken, kept) == ([], [link])


async def test_a_sink_that_wants_no_more_gets_no_more() -> None:
    sink = Sink(wanted=1)
    async with upstream_connection(serve_pieces(CHUNKED[:60], b"1\r\n!\r\n" * 20)) as (link, kept):
        assert await poured(link, sink) == b""
    assert len(sink.taken) == 1
    assert not kept


async def test_a_cut_answer_is_poured_up_to_the_cut() -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart"
    sink = Sink()
    async with upstream_connection(serve_once(cut)) as (link, _):
        with pytest.raises(ConnectionLost):
            await poured(link, sink)
    assert b"".join(sink.taken) == b"part"


async def test_what_came_before_it_is_poured_is_poured_and_the_rest_behind_it() -> None:
    size = 1_000_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    sink = Sink()
    async with upstream_connection(serve_pieces(head + b"x" * size)) as (link, kept):
        response = await send_request(link)
        await asyncio.sleep(0.1)  # so much waits by now that the worker has to
        last = await response.pour(sink)
        response.close()
    assert sum(map(len, sink.taken)) + len(last) == size
    assert kept == [link]


async def test_a_worker_that_is_made_to_wait_is_not_silent() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
    sink = Sink()
    async with upstream_connection(serve_pieces(head, b"on", b"e!")) as (link, kept):
        response = await send_request(link)
        pouring = asyncio.create_task(response.pour(sink))
        await asyncio.sleep(0)
        response.pause(True)
        response.set_read_timeout(0.1)
        await asyncio.sleep(0.5)
        response.set_read_timeout(30)
        response.pause(False)
        last = await pouring
        response.close()
    assert b"".join(sink.taken) + last == b"one!"
    assert kept == [link]
