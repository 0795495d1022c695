"""HTTP chunks of an answer that pass as they came, over a real socket."""

from __future__ import annotations

from random import Random

import pytest

from gateway.http.upstream import Link
from tests.support.upstream_connections import answering, ask, linked

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

    async def poured_from(self, link: Link) -> bytes:
        """Ask, and return all of the answer."""
        answer = await ask(link)
        try:
            last = await answer.pour(self.piece, self.chunk)
        finally:
            answer.close()
        return b"".join((*self.content, last))


async def test_whole_chunks_pass_as_they_came_and_the_answer_goes_on_behind_them() -> None:
    words = (b"5\r\nfirst\r\n", b"3\r\none\r\n", b"B\r\n, and two!!\r\n", b"2\r\n..\r\n")
    taker = Taker()
    async with linked(answering(HEAD + words[0], *words[1:], END)) as (link, kept):
        for number in (1, 2):
            told = await taker.poured_from(link)
            assert told == b"firstone, and two!!.." * number
    assert taker.passed == [*words[1:], *words[1:]]
    assert kept == [link, link]


async def test_a_chunk_that_is_not_taken_comes_as_a_piece() -> None:
    taker = Taker(takes=False)
    async with linked(answering(HEAD + b"3\r\none\r\n", b"4\r\n two\r\n", END)) as (link, kept):
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
    async with linked(answering(*pieces, END)) as (link, kept):
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
    async with linked(answering(HEAD + b"2\r\nok\r\n", *pieces, END)) as (link, kept):
        await taker.poured_from(link)
    assert not taker.passed
    assert kept == [link]


async def test_nothing_passes_behind_the_end() -> None:
    taker = Taker()
    end = b"2\r\nok\r\n" + END
    async with linked(answering(HEAD, end + b"3\r\nabc\r\n", b"3\r\nabc\r\n")) as (link, kept):
        assert await taker.poured_from(link) == b"ok"
    assert not taker.passed
    assert not kept


async def test_a_body_that_is_not_chunked_never_passes_as_chunks() -> None:
    taker = Taker()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n"
    async with linked(answering(head, b"3\r\nabc\r\n", b"3\r\nabc\r\n")) as (link, kept):
        assert await taker.poured_from(link) == b"3\r\nabc\r\n" * 2
    assert not taker.passed
    assert kept == [link]
