"""The link to Redis: what the library under it must not do."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from gateway.errors import RecordsUnwritable
from gateway.redis_link import RedisLink
from tests.gateway.redis_server import RedisServer


async def test_no_question_waits_in_a_way_that_may_swallow_the_end_of_its_task(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swallows(*_: object, **__: object) -> NoReturn:
        raise AssertionError("before Python 3.12 wait_for may swallow a cancellation")

    link = RedisLink(redis.url)
    monkeypatch.setattr(asyncio, "wait_for", swallows)
    try:
        assert await link.ask("tests", link.redis.ping)
        assert await link.ask("tests", lambda: link.script("return 7")([], [])) == 7
    finally:
        await link.close()


async def test_a_connection_that_is_closed_under_a_question_is_a_redis_that_is_away(
    redis: RedisServer,
) -> None:
    async def asks_uvloop() -> NoReturn:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    link = RedisLink(redis.url)
    with pytest.raises(RecordsUnwritable):
        await link.ask("tests", asks_uvloop)
    assert link.away
    assert link.why == "Redis cannot be reached."
    await link.close()
