"""F29 to F34: a Redis that is down, frozen, slow, cut off, empty, full or read-only."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fault_proxy import NO_FAULT, Fault, FaultProxy, running_proxy
from tests.support.gateway_fixtures import QUICK, StartGateway
from tests.support.redis_server import RedisServer
from tests.support.redis_status import is_connected, is_degraded, redis_status, remaining
from tests.support.running_gateway import (
    RunningGateway,
    status_and_code,
    wait_until,
    wait_until_all,
)

SHORT_DEADLINE = replace(QUICK, redis_deadline_s=0.5)
POLICY = "/admin/v1/policy"


def policy_version(gateway: RunningGateway) -> str:
    return gateway.admin.get(POLICY).headers["x-paceline-policy-version"]


def redis_url(proxy: FaultProxy) -> str:
    return proxy.url.replace("http", "redis") + "/0"


def use_once_known(key: Mapping[str, str], *gateways: RunningGateway) -> None:
    """Use a key at gateways that have all read it."""
    for gateway in gateways:
        gateway.use_key(key["secret"])
    wait_until_all(gateways, lambda one: one.client.get("/v1/models").is_success)


def metric(gateway: RunningGateway) -> str:
    text = gateway.client.get("/metrics").text
    return next(line for line in text.splitlines() if line.startswith("paceline_store_degraded "))


def local_copy_contains(gateway_folder: Path, text: str) -> bool:
    return any(text in file.read_text() for file in gateway_folder.glob("shared-*.json"))


def test_f29_a_start_without_redis_serves_stored_keys_and_recovers(
    private_redis: RedisServer, start_joined: StartGateway, tmp_path: Path
) -> None:
    before = start_joined()
    active, revoked = before.create_key(), before.create_key()
    before.use_key(active["secret"])
    assert before.admin.delete(f"/admin/v1/keys/{revoked['id']}").is_success
    wait_until(lambda: local_copy_contains(tmp_path / "a", "revoked_at"))
    before.shut_down()
    private_redis.kill()

    after = start_joined()
    assert after.chat().status_code == 401
    after.use_key(revoked["secret"])
    assert after.chat().status_code == 401, "the key is still revoked"
    after.use_key(active["secret"])
    assert after.chat().status_code == 200
    ready = after.client.get("/readyz")
    assert (ready.status_code, ready.text) == (200, "ready, degraded: Redis cannot be reached.\n")
    degraded = {"state": "degraded", "problem": "Redis cannot be reached.", "file_problem": ""}
    assert redis_status(after).items() >= {"kind": "redis", **degraded, "gateways": 0}.items()
    assert metric(after) == "paceline_store_degraded 1.0"
    rejected = after.admin.post("/admin/v1/keys", json={"name": "not now"})
    assert status_and_code(rejected) == (503, "state_unavailable")

    private_redis.start()
    wait_until(lambda: is_connected(after))
    assert metric(after) == "paceline_store_degraded 0.0"
    after.create_key()
    assert after.chat().status_code == 200


def test_f29_an_idle_gateway_reconnects_after_an_outage(
    private_redis: RedisServer, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """The usage flush also checks Redis when there is no usage to write."""
    before = start_gateway()
    key = before.create_key()
    wait_until(lambda: local_copy_contains(tmp_path / "a", key["id"]))
    before.shut_down()
    private_redis.kill()

    after = start_gateway(timing=replace(QUICK, usage_flush_s=0.02))
    after.use_key(key["secret"])
    threading.Event().wait(0.1)  # several usage flushes without usage
    assert not is_connected(after)
    private_redis.start()
    wait_until(lambda: is_connected(after))


def test_f29_a_gateway_without_any_stored_keys_returns_401_until_redis_is_back(
    private_redis: RedisServer, start_joined: StartGateway
) -> None:
    private_redis.kill()
    gateway = start_joined()
    assert gateway.chat().status_code == 401
    private_redis.start()
    wait_until(lambda: gateway.chat().status_code == 200)
    wait_until(lambda: policy_version(gateway) == "1")


@pytest.mark.parametrize(
    ("break_redis", "mend_redis"),
    [(RedisServer.kill, RedisServer.start), (RedisServer.freeze, RedisServer.resume)],
    ids=["kill", "freeze"],
)
def test_f30_f31_requests_do_not_wait_for_redis_and_counts_are_written_later(
    private_redis, start_joined, break_redis, mend_redis
) -> None:
    gateway = start_joined(timing=SHORT_DEADLINE)
    assert gateway.chat().status_code == 200
    break_redis(private_redis)
    # A frozen Redis never replies, so a request that waited for it would never end.
    assert [gateway.chat().status_code for _ in range(5)] == [200] * 5
    wait_until(lambda: is_degraded(gateway))
    assert gateway.client.get("/readyz").status_code == 200
    assert gateway.status()["outcomes"] == {"completed": 6}
    mend_redis(private_redis)
    wait_until(lambda: is_connected(gateway))
    other = start_joined("b")
    wait_until(lambda: other.outcomes() == {"completed": 6})


def test_f30_without_redis_a_gateway_admits_its_share_of_a_limit(
    private_redis: RedisServer, start_gateway: StartGateway, start_joined: StartGateway
) -> None:
    first, second = start_joined("a"), start_gateway("b")
    key = first.create_key(requests_a_minute=8)
    use_once_known(key, first, second)
    wait_until(lambda: redis_status(first)["gateways"] == redis_status(second)["gateways"] == 2)
    wait_until(lambda: second.client.get("/readyz").status_code == 200)
    private_redis.kill()
    wait_until(lambda: is_degraded(first) and is_degraded(second))

    # Each periodic exchange notices the outage by itself: limits may follow the status later.
    wait_until(lambda: max(remaining(one, "requests") for one in (first, second)) <= 4)
    for gateway in (first, second):
        served = [gateway.chat().status_code for _ in range(10)].count(200)
        assert 4 <= served <= 5, "half of the limit, and at most one refilled request"


def test_f31_a_redis_that_replies_after_the_deadline_counts_as_unreachable(
    private_redis: RedisServer, start_joined: StartGateway
) -> None:
    with running_proxy(private_redis.url.removesuffix("/0")) as proxy:
        gateway = start_joined("a", redis_url(proxy), SHORT_DEADLINE)
        proxy.fault = Fault(drip_bytes=65536, drip_pause_s=1.0)
        proxy.reset_all()
        wait_until(lambda: is_degraded(gateway))
        assert [gateway.chat().status_code for _ in range(5)] == [200] * 5
        wait_until(lambda: "in time" in str(redis_status(gateway).get("problem")))
        proxy.fault = NO_FAULT
        proxy.reset_all()
        wait_until(lambda: is_connected(gateway))


def test_f31_a_repeated_unconfirmed_edit_is_applied_once(private_redis, start_gateway) -> None:
    gateway = start_gateway(timing=replace(QUICK, redis_admin_deadline_s=0.3))
    wait_until(lambda: policy_version(gateway) == "1")
    before = gateway.admin.get(POLICY)
    document = before.json() | {"prefix": {"max_workers": 2}}
    headers = {"if-match": before.headers["etag"], "x-paceline-note": "two workers"}

    def edit() -> tuple[int, str]:
        response = gateway.admin.put(POLICY, json=document, headers=headers)
        return (200, "") if response.is_success else status_and_code(response)

    def edit_while_frozen() -> tuple[int, str]:
        private_redis.freeze()
        try:
            return edit()
        finally:
            private_redis.resume()

    # On a slow machine the gateway may mark Redis unreachable before it sends the edit.
    wait_until(lambda: is_connected(gateway) and edit_while_frozen() == (503, "write_unconfirmed"))
    wait_until(lambda: edit() == (412, "version_conflict"))
    versions = gateway.admin.get(f"{POLICY}/history").json()["versions"]
    assert [version["note"] for version in versions].count("two workers") == 1


def test_f32_a_disconnected_gateway_admits_its_share_and_sums_converge_later(
    private_redis: RedisServer, start_gateway: StartGateway, start_joined: StartGateway
) -> None:
    with running_proxy(private_redis.url.removesuffix("/0")) as proxy:
        first, second = start_joined("a"), start_gateway("b", redis_url(proxy))
        use_once_known(first.create_key(tokens_a_day=200), first, second)
        wait_until(lambda: redis_status(second)["gateways"] == 2)
        wait_until(lambda: second.client.get("/readyz").status_code == 200)
        proxy.refuse()
        # Each periodic exchange notices the outage by itself: limits may follow the status later.
        wait_until(lambda: is_degraded(second) and remaining(second) <= 100)

        disconnected = [second.chat(max_tokens=5).status_code for _ in range(14)].count(200)
        connected = [first.chat(max_tokens=5).status_code for _ in range(5)].count(200)
        assert disconnected <= 10, "at most half of the limit: a response costs ten tokens"
        assert connected == 5
        assert first.status()["outcomes"].get("completed") == connected

        proxy.listen()
        wait_until(lambda: is_connected(second))
        total = disconnected + connected
        wait_until_all((first, second), lambda one: one.outcomes().get("completed") == total)
        wait_until(lambda: remaining(first) == remaining(second) == 200 - 10 * total)


def _overwrite(redis: RedisServer) -> None:
    """Give each key another type, but leave the join token: a text is the type that it has."""
    for key in redis.client.scan_iter("paceline:*"):
        if redis.client.type(key) != "string":
            redis.client.set(key, "text of an operator")


@pytest.mark.parametrize(
    ("break_redis", "mend_redis", "problem"),
    [
        (
            lambda redis: redis.configure("maxmemory", "1"),
            lambda redis: redis.configure("maxmemory", "0"),
            "Redis is full.",
        ),
        (
            lambda redis: redis.client.replicaof("127.0.0.1", 9),
            lambda redis: redis.client.replicaof("no", "one"),
            "Redis is a read-only replica.",
        ),
        (
            _overwrite,
            lambda redis: redis.client.flushall(),
            "A Redis key of Paceline has another type.",
        ),
    ],
    ids=["full", "read-only", "overwritten"],
)
def test_f34_a_redis_that_rejects_commands_degrades_the_gateway_and_loses_no_record(
    private_redis, start_joined, break_redis, mend_redis, problem
) -> None:
    gateway = start_joined()
    key = gateway.create_key(requests_a_minute=100)
    gateway.use_key(key["secret"])
    assert gateway.chat().status_code == 200
    break_redis(private_redis)
    wait_until(lambda: redis_status(gateway).get("problem") == problem)
    assert gateway.chat().status_code == 200
    # On a busy machine, a call of an exchange may miss its deadline in between.
    wait_until(lambda: gateway.client.get("/readyz").text == f"ready, degraded: {problem}\n")
    assert gateway.client.get("/v1/models", headers={"authorization": "none"}).status_code == 401

    def rejection_code() -> str:
        rejected = gateway.admin.post("/admin/v1/keys", json={"name": "not now"})
        assert rejected.status_code == 503
        return str(rejected.json()["error"]["code"])

    if problem == "Redis is full.":
        gateway.create_key()  # what admins write has room in a full Redis too
    else:
        # On a slow machine the rejection may arrive after the deadline, as an unconfirmed edit.
        wait_until(lambda: rejection_code() == "state_unavailable")
    mend_redis(private_redis)
    wait_until(lambda: is_connected(gateway))
    gateway.create_key()
    assert gateway.chat().status_code == 200
    other = start_joined("b")
    other.use_key(key["secret"])
    wait_until(lambda: other.outcomes() == gateway.outcomes())
