"""One connection to a worker, over a real socket: whose bytes are whose, and when it is kept."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway.http.upstream import HEAD_LIMIT_BYTES, LinkLost, LinkSilent
from tests.support.upstream_connections import (
    BODY,
    CHUNKED,
    PATIENCE_S,
    REQUEST,
    answering,
    answering_and_leaving,
    ask,
    linked,
)


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
async def test_an_answer_is_the_same_however_it_is_split(step: int) -> None:
    pieces = [CHUNKED[at : at + step] for at in range(0, len(CHUNKED), step)]
    async with linked(answering(*pieces)) as (link, kept):
        for _ in range(2):
            answer = await ask(link)
            assert (answer.status, await answer.read()) == (200, b"one two")
            answer.close()
    assert kept == [link, link]
    assert link.used


async def test_what_comes_before_the_answer_is_not_the_answer() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    late = b"HTTP/1.1 429 No\r\nRetry-After: 7\r\ncontent-length: 2\r\n\r\nno"
    for pieces in ((early, late), (early + late,)):
        async with linked(answering(*pieces)) as (link, kept):
            answer = await ask(link)
            assert (answer.status, answer.retry_after) == (429, "7")
            assert await answer.read() == b"no"
            answer.close()
            assert kept


async def test_http_1_0_ends_its_answer_with_the_connection() -> None:
    async with linked(answering_and_leaving(b"HTTP/1.0 200 OK\r\n\r\nall ", b"of it")) as (
        link,
        kept,
    ):
        answer = await ask(link)
        assert await answer.read() == b"all of it"
        answer.close()
    assert not kept


@pytest.mark.parametrize(
    "cut",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\npart\r\n",
    ],
)
async def test_a_cut_answer_gives_what_came_and_then_the_loss(cut: bytes) -> None:
    async with linked(answering_and_leaving(cut)) as (link, kept):
        answer = await ask(link)
        assert await answer.chunk() == b"part"
        with pytest.raises(LinkLost):
            await answer.chunk()
        answer.close()
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
    async with linked(answering_and_leaving(nonsense)) as (link, _):
        with pytest.raises(LinkLost):
            await ask(link)
        assert link.heard == bool(nonsense)


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
EVIL = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"


@pytest.mark.parametrize("pieces", [(OK, EVIL), (OK + EVIL,)])
async def test_bytes_that_nobody_asked_for_end_the_connection(pieces: tuple[bytes, ...]) -> None:
    async with linked(answering(*pieces)) as (link, _):
        answer = await ask(link)
        assert await answer.read() == b"ok"
        answer.close()
        async with asyncio.timeout(PATIENCE_S):
            while link.open:
                await asyncio.sleep(0.001)
        with pytest.raises(LinkLost):
            await ask(link)


async def test_an_answer_left_early_ends_the_connection() -> None:
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(BODY)
        writer.write(CHUNKED[:60])
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    async with linked(serve) as (link, kept):
        (await ask(link)).close()
        await asyncio.wait_for(left.wait(), PATIENCE_S)
    assert not kept


async def test_an_answer_before_the_request_was_read_is_taken_and_the_connection_is_not_kept() -> (
    None
):
    answered = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await answered.wait()

    async with linked(serve) as (link, kept):
        answer = await link.ask(REQUEST, b"x" * 50_000_000, PATIENCE_S)
        assert (answer.status, await answer.read()) == (413, b"")
        answer.close()
        answered.set()
    assert not kept


async def test_each_wait_is_bounded_and_not_the_whole() -> None:
    slow = answering(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", *[b"x"] * 40)
    async with linked(slow) as (link, _):
        answer = await ask(link)
        answer.limit_silence(0.5)
        received = bytearray()

        async def receive() -> None:
            while part := await answer.chunk():
                received.extend(part)

        with pytest.raises(LinkSilent):
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

    async with linked(serve) as (link, _):
        answer = await ask(link)
        before = -1
        while sent_bytes != before:  # until it can send no more
            before = sent_bytes
            await asyncio.sleep(0.2)
        assert sent_bytes < 50_000_000, "what is under way is what sockets hold"
        assert len(await answer.read()) == 100_000_000


async def test_a_connection_whose_last_reader_was_slow_reads_for_the_next() -> None:
    async with linked(answering(CHUNKED)) as (link, kept):
        answer = await ask(link)
        assert await answer.read() == b"one two"
        link.press(True)  # as the last piece does that its client cannot take at once
        answer.close()
        assert kept == [link]
        assert await asyncio.wait_for((await ask(link)).read(), PATIENCE_S) == b"one two"


async def test_a_reader_that_is_pressed_by_a_passing_chunk_is_no_silence_of_the_worker() -> None:
    head, first, second, end = (
        CHUNKED.partition(b"3\r\n")[0],
        b"3\r\none\r\n",
        b"3\r\ntwo\r\n",
        b"0\r\n\r\n",
    )
    async with linked(answering(head + first, second, end)) as (link, kept):
        answer = await ask(link)
        link.limit_silence(0.1)
        passed: list[bytes] = []

        def through(chunk: bytes) -> bool:
            passed.append(chunk)
            link.press(True)
            asyncio.get_running_loop().call_later(0.4, link.press, False)
            return True

        assert await link.pour(lambda _: True, through) == b""
        answer.close()
    assert passed == [second]
    assert kept == [link]
