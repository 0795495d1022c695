"""The Redis client: deadlines, cancellation and lost connections."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import pytest

from gateway.cluster.redis import DEADLINE_S, RedisClient
from gateway.errors import RecordsUnwritable, WriteUnconfirmed
from gateway.server import run
from tests.support.redis_server import RedisServer


async def test_calls_do_not_use_asyncio_wait_for(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12, `asyncio.wait_for` may swallow a cancellation."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("before Python 3.12 wait_for may swallow a cancellation")

    client = RedisClient(redis.url)
    monkeypatch.setattr(asyncio, "wait_for", fail)
    try:
        assert await client.call("tests", client.redis.ping)
        assert await client.call("tests", lambda: client.script("return 7")([], [])) == 7
    finally:
        await client.close()


def test_a_reply_received_while_the_process_was_suspended_confirms_the_edit(
    redis: RedisServer,
) -> None:
    async def call_while_suspended(client: RedisClient) -> bool:
        # The machine sleeps between call and reply and wakes up after every deadline.
        asyncio.get_running_loop().call_later(0.01, time.sleep, DEADLINE_S + 0.2)
        await client.redis.blpop(["empty list"], 0.03)
        return True

    async def main() -> None:
        client = RedisClient(redis.url)
        try:
            connect = client.script("return 1")
            assert await client.write(connect), "the connection is open"
            assert await client.write(lambda: call_while_suspended(client))
        finally:
            await client.close()

    run(main())


async def test_an_unconfirmed_edit_is_cancelled_later(
    redis: RedisServer,
) -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    client = RedisClient(redis.url)
    with pytest.raises(WriteUnconfirmed):
        await client.write(hang)
    async with asyncio.timeout(60):
        await ended.wait()
    await client.close()


async def test_a_connection_closed_during_a_call_means_redis_is_unreachable(
    redis: RedisServer,
) -> None:
    async def raise_like_uvloop() -> NoReturn:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    client = RedisClient(redis.url)
    with pytest.raises(RecordsUnwritable):
        await client.call("tests", raise_like_uvloop)
    assert client.unreachable
    assert client.problem == "Redis cannot be reached."
    await client.close()


async def test_a_call_to_a_redis_that_closes_connections_connects_once() -> None:
    connections = 0

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    client = RedisClient(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    try:
        with pytest.raises(RecordsUnwritable):
            await client.call("tests", client.redis.ping)
        assert connections == 1
    finally:
        await client.close()
        server.close()
