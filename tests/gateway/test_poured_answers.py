"""An answer that is poured into a sink as it comes, over a real socket."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.upstream import Link, LinkLost
from tests.support.upstream_connections import (
    CHUNKED,
    answering,
    answering_and_leaving,
    ask,
    linked,
)


class Sink:
    """Takes up to a number of pieces."""

    def __init__(self, wanted: int | None = None) -> None:
        self.taken: list[bytes] = []
        self._wanted = wanted

    def __call__(self, piece: bytes) -> bool:
        self.taken.append(piece)
        return len(self.taken) != self._wanted


async def poured(link: Link, sink: Sink) -> bytes:
    """Ask, and return what came with the end."""
    answer = await ask(link)
    try:
        return await answer.pour(sink)
    finally:
        answer.close()


async def test_an_answer_is_poured_as_it_comes_and_what_came_with_the_end_is_left() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"
    sink = Sink()
    async with linked(answering(head + b"on", b"e ", b"tw")) as (link, kept):
        last = await poured(link, sink)
    assert b"".join(sink.taken) + last == b"one tw"
    assert last.endswith(b"tw")
    assert kept == [link]


async def test_an_answer_of_one_packet_is_all_left() -> None:
    sink = Sink()
    async with linked(answering(CHUNKED)) as (link, kept):
        assert await poured(link, sink) == b"one two"
    assert (sink.taken, kept) == ([], [link])


async def test_a_sink_that_wants_no_more_gets_no_more() -> None:
    sink = Sink(wanted=1)
    async with linked(answering(CHUNKED[:60], b"1\r\n!\r\n" * 20)) as (link, kept):
        assert await poured(link, sink) == b""
    assert len(sink.taken) == 1
    assert not kept


async def test_a_cut_answer_is_poured_up_to_the_cut() -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart"
    sink = Sink()
    async with linked(answering_and_leaving(cut)) as (link, _):
        with pytest.raises(LinkLost):
            await poured(link, sink)
    assert b"".join(sink.taken) == b"part"


async def test_what_came_before_it_is_poured_is_poured_and_the_rest_behind_it() -> None:
    size = 1_000_000
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    sink = Sink()
    async with linked(answering(head + b"x" * size)) as (link, kept):
        answer = await ask(link)
        await asyncio.sleep(0.1)  # so much waits by now that the worker has to
        last = await answer.pour(sink)
        answer.close()
    assert sum(map(len, sink.taken)) + len(last) == size
    assert kept == [link]


async def test_a_worker_that_is_made_to_wait_is_not_silent() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
    sink = Sink()
    async with linked(answering(head, b"on", b"e!")) as (link, kept):
        answer = await ask(link)
        pouring = asyncio.create_task(answer.pour(sink))
        await asyncio.sleep(0)
        answer.press(True)
        answer.limit_silence(0.1)
        await asyncio.sleep(0.5)
        answer.limit_silence(30)
        answer.press(False)
        last = await pouring
        answer.close()
    assert b"".join(sink.taken) + last == b"one!"
    assert kept == [link]
