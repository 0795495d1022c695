"""The link to Redis: what the library under it must not do."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import pytest

from gateway.cluster.redis import DEADLINE_S, RedisClient
from gateway.errors import RecordsUnwritable, WriteUnconfirmed
from gateway.server import run
from tests.support.redis_server import RedisServer


async def test_no_question_waits_in_a_way_that_may_swallow_the_end_of_its_task(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallows(*_: object, **__: object) -> NoReturn:
        raise AssertionError("before Python 3.12 wait_for may swallow a cancellation")

    link = RedisClient(redis.url)
    monkeypatch.setattr(asyncio, "wait_for", swallows)
    try:
        assert await link.call("tests", link.redis.ping)
        assert await link.call("tests", lambda: link.script("return 7")([], [])) == 7
    finally:
        await link.close()


def test_an_edit_that_redis_answered_while_this_process_stood_still_is_answered(
    redis: RedisServer,
) -> None:
    async def asks(link: RedisClient) -> bool:
        # Between question and answer the machine sleeps; it wakes up behind every deadline.
        asyncio.get_running_loop().call_later(0.01, time.sleep, DEADLINE_S + 0.2)
        await link.redis.blpop(["nothing is there"], 0.03)
        return True

    async def main() -> None:
        link = RedisClient(redis.url)
        try:
            connect = link.script("return 1")
            assert await link.write(connect), "the connection is there"
            assert await link.write(lambda: asks(link))
        finally:
            await link.close()

    run(main())


async def test_an_edit_that_nobody_waits_for_any_more_does_not_go_on_for_ever(
    redis: RedisServer,
) -> None:
    ended = asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    link = RedisClient(redis.url)
    with pytest.raises(WriteUnconfirmed):
        await link.write(hangs)
    async with asyncio.timeout(60):
        await ended.wait()
    await link.close()


async def test_a_connection_that_is_closed_under_a_question_is_a_redis_that_is_away(
    redis: RedisServer,
) -> None:
    async def asks_uvloop() -> NoReturn:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    link = RedisClient(redis.url)
    with pytest.raises(RecordsUnwritable):
        await link.call("tests", asks_uvloop)
    assert link.unreachable
    assert link.problem == "Redis cannot be reached."
    await link.close()
