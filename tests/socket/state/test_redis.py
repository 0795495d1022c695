"""The Redis client: deadlines, cancellation and lost connections."""

import asyncio
import time
from pathlib import Path
from typing import NoReturn

import pytest
from pydantic import SecretStr
from redis.exceptions import ResponseError

from gateway.errors import RecordsUnwritable, StartupError, WriteUnconfirmed
from gateway.event_loop import run
from gateway.server import serve
from gateway.state.join_token import SharedJoinToken
from gateway.state.redis import RedisClient
from paceline.lifecycle import Shutdown
from tests.support.gateway_fixtures import MakeClusterGateway, OpenRedis
from tests.support.http_server import serve_streams
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import make_settings
from tests.support.scripted_worker import JOIN_TOKEN

SHORT_S = 0.05
"""A deadline."""


async def test_calls_do_not_use_asyncio_wait_for(redis, open_redis, monkeypatch) -> None:
    """Before Python 3.12, `asyncio.wait_for` may swallow a cancellation."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("before Python 3.12 wait_for may swallow a cancellation")

    client = open_redis(redis)
    monkeypatch.setattr(asyncio, "wait_for", fail)
    assert await client.call("tests", client.redis.ping)
    assert await client.call("tests", lambda: client.script("return 7")([], [])) == 7


def test_a_reply_received_while_the_process_was_suspended_is_in_time(redis: RedisServer) -> None:
    async def call_while_suspended(client: RedisClient) -> bool:
        # The machine sleeps between call and reply and wakes up after every deadline.
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.5)
        await client.redis.blpop(["empty list"], 0.03)
        return True

    async def main() -> None:
        client = RedisClient(redis.url, SHORT_S, SHORT_S)
        try:
            await client.redis.ping()  # the connection is open
            assert await client.write(lambda: call_while_suspended(client))
            assert await client.call("tests", lambda: call_while_suspended(client))
        finally:
            await client.close()

    run(main())


async def test_an_unconfirmed_edit_is_cancelled_later(redis, open_redis) -> None:
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    with pytest.raises(WriteUnconfirmed):
        await open_redis(redis, SHORT_S, SHORT_S).write(hang)
    async with asyncio.timeout(60):
        await ended.wait()


@pytest.mark.parametrize("error", [None, ResponseError("full")])
async def test_only_a_late_write_that_fails_is_logged(redis, caplog, error) -> None:
    written, ended = asyncio.Event(), asyncio.Event()

    async def write_late() -> None:
        await written.wait()
        ended.set()
        if error is not None:
            raise error

    client = RedisClient(redis.url, admin_deadline_s=SHORT_S)
    with pytest.raises(WriteUnconfirmed):
        await client.write(write_late)
    written.set()
    await ended.wait()
    await asyncio.sleep(0)
    await client.close()
    assert ("redis.late_write_failed" in caplog.text) == (error is not None)


async def test_a_problem_of_several_parts_is_logged_once_and_its_end_once(
    redis: RedisServer, open_redis: OpenRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    client = open_redis(redis)
    failing = client.script("return redis.error_reply('no')")
    for part in ("keys", "limits", "keys"):
        with pytest.raises(RecordsUnwritable):
            await client.call(part, failing)
    for part in ("keys", "limits", "keys"):
        await client.call(part, client.redis.ping)
    events = [record.getMessage().split(" problem=")[0] for record in caplog.records]
    assert [event for event in events if event.startswith("redis.")] == [
        "redis.degraded part=keys",
        "redis.recovered part=limits",
    ]


async def test_a_connection_closed_during_a_call_means_redis_is_unreachable(
    redis: RedisServer, open_redis: OpenRedis
) -> None:
    async def raise_like_uvloop() -> NoReturn:
        raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")

    client = open_redis(redis)
    with pytest.raises(RecordsUnwritable):
        await client.call("tests", raise_like_uvloop)
    assert client.unreachable
    assert client.problem == "Redis cannot be reached."


async def test_a_call_to_a_redis_that_closes_connections_connects_once() -> None:
    connections = 0

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.close()

    async with serve_streams(close) as port:
        client = RedisClient(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(RecordsUnwritable):
            await client.call("tests", client.redis.ping)
        await client.close()
    assert connections == 1


async def test_l3_a_gateway_with_another_join_token_does_not_start(
    redis: RedisServer, make_cluster_gateway: MakeClusterGateway, tmp_path: Path
) -> None:
    first = make_cluster_gateway()
    settings = make_settings(tmp_path / "other", redis_url=SecretStr(redis.url))
    other = settings.model_copy(update={"join_token": SecretStr("another-join-token")})
    with pytest.raises(StartupError, match="have another join token") as error:
        await serve(other, shutdown=Shutdown())
    assert JOIN_TOKEN not in str(error.value)
    assert first.status()["store"]["state"] == "ok"
    make_cluster_gateway()


async def test_l3_another_join_token_is_reported_once_redis_is_back(redis, open_redis) -> None:
    client = open_redis(redis)
    token, other = SharedJoinToken(open_redis(redis), "one"), SharedJoinToken(client, "two")
    await token.exchange()
    with pytest.raises(RecordsUnwritable):
        await other.exchange()
    assert client.problem == "Other gateways on this Redis have another join token."
    key = "paceline:{join_token}:digest"
    assert 0 < redis.client.pttl(key) <= 10_000
    redis.client.delete(key)  # as after the end of the first gateway
    await other.exchange()
    assert client.problem == ""
