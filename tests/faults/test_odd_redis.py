"""F33 and F34: Redis is there, but empty, full, read-only, or with something else in it."""

from __future__ import annotations

import pytest

from tests.socket.conftest import Break, Joins, Starts
from tests.support.redis_server import RedisServer
from tests.support.redis_status import store, well
from tests.support.running_gateway import bearing, error_of, eventually


def test_f33_a_redis_that_comes_back_empty_is_told_everything_again(
    own_redis: RedisServer, starts: Starts, joins: Joins
) -> None:
    first, second = starts("a"), starts("b")
    joins(first)
    good, bad = first.make_key(), first.make_key()
    first.admin.delete(f"/admin/v1/keys/{bad['id']}")
    for gateway in (first, second):
        gateway.bear(good["secret"])
        eventually(lambda gateway=gateway: gateway.chat().status_code == 200)  # type: ignore[misc]
    eventually(lambda: first.status()["outcomes"] == second.status()["outcomes"])
    own_redis.kill()
    own_redis.start()

    # A Redis that starts quickly may not have been missed yet.
    eventually(lambda: own_redis.client.hlen("paceline:{keys}:records") > 3)
    for gateway in (first, second):
        eventually(lambda gateway=gateway: well(gateway))  # type: ignore[misc]
        assert gateway.chat().status_code == 200
        refused = gateway.client.get("/v1/models", headers=bearing(bad))
        assert refused.status_code == 401, "revoked stays revoked"
    third = starts("c")
    third.bear(good["secret"])
    eventually(lambda: third.chat().status_code == 200)
    assert third.client.get("/v1/models", headers=bearing(bad)).status_code == 401
    assert third.admin.get("/admin/v1/policy").headers["x-paceline-policy-version"] == "1"
    eventually(lambda: third.status()["outcomes"] == first.status()["outcomes"])


def _fills(redis: RedisServer) -> None:
    redis.configure("maxmemory", "1")


def _has_room(redis: RedisServer) -> None:
    redis.configure("maxmemory", "0")


def _turns_read_only(redis: RedisServer) -> None:
    redis.client.replicaof("127.0.0.1", 9)


def _may_be_written(redis: RedisServer) -> None:
    redis.client.replicaof("no", "one")


def _holds_something_else(redis: RedisServer) -> None:
    for key in redis.client.keys("paceline:*"):
        redis.client.set(key, "what a person tried")


def _is_cleared(redis: RedisServer) -> None:
    redis.client.flushall()


REFUSALS = (
    (_fills, _has_room, "Redis is full."),
    (_turns_read_only, _may_be_written, "Redis is read-only."),
    (_holds_something_else, _is_cleared, "A key of Paceline holds something else in Redis."),
)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_f34_a_redis_that_refuses_is_a_failure_and_never_an_empty_answer(
    own_redis: RedisServer, starts: Starts, joins: Joins, refusal: tuple[Break, Break, str]
) -> None:
    breaks, mends, why = refusal
    gateway = starts()
    joins(gateway)
    key = gateway.make_key(requests_a_minute=100)
    gateway.bear(key["secret"])
    assert gateway.chat().status_code == 200
    breaks(own_redis)
    eventually(lambda: store(gateway).get("why") == why)
    assert gateway.chat().status_code == 200
    assert gateway.client.get("/readyz").text == f"ready, degraded: {why}\n"
    assert gateway.client.get("/v1/models", headers={"authorization": "none"}).status_code == 401

    def refused() -> str:
        status, code = error_of(gateway.admin.post("/admin/v1/keys", json={"name": "not now"}))
        assert status == 503
        return code

    # On a slow machine a refusal may come too late to be told from no answer.
    eventually(lambda: refused() == "state_unavailable")
    mends(own_redis)
    eventually(lambda: well(gateway))
    gateway.make_key()
    assert gateway.chat().status_code == 200
    other = starts("b")
    other.bear(key["secret"])
    eventually(lambda: other.status()["outcomes"] == gateway.status()["outcomes"])
