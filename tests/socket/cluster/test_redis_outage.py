"""F29 to F32: Redis is down, dies, freezes, is slow, or one of two gateways is cut off from it.

F33 and F34: Redis is there, but empty, full, read-only, or with something else in it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.fault_proxy import NO_FAULT, Fault, FaultProxy, running_proxy
from tests.support.gateway_fixtures import BreakRedis, KeepJoined, StartGateway
from tests.support.redis_server import RedisServer
from tests.support.redis_status import is_connected, is_degraded, redis_status
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    status_and_code,
    wait_until,
)


def metric(gateway: RunningGateway) -> str:
    text = gateway.client.get("/metrics").text
    return next(line for line in text.splitlines() if line.startswith("paceline_store_degraded "))


def copied(gateway_folder: Path, word: str) -> bool:
    return any(word in file.read_text() for file in gateway_folder.glob("shared-*.json"))


def test_f29_a_start_without_redis_serves_the_keys_that_were_known_and_heals(
    private_redis: RedisServer, start_gateway: StartGateway, keep_joined: KeepJoined, tmp_path: Path
) -> None:
    before = start_gateway()
    good, bad = before.create_key(), before.create_key()
    before.use_key(good["secret"])
    assert before.admin.delete(f"/admin/v1/keys/{bad['id']}").is_success
    wait_until(lambda: copied(tmp_path / "a", "revoked_at"))
    before.request_shutdown()
    before.wait_closed()
    private_redis.kill()

    after = start_gateway()
    keep_joined(after)
    assert after.chat().status_code == 401
    after.use_key(bad["secret"])
    assert after.chat().status_code == 401, "revoked stays revoked"
    after.use_key(good["secret"])
    assert after.chat().status_code == 200
    ready = after.client.get("/readyz")
    assert (ready.status_code, ready.text) == (200, "ready, degraded: Redis cannot be reached.\n")
    assert redis_status(after) == {
        "kind": "redis",
        "state": "degraded",
        "problem": "Redis cannot be reached.",
        "gateways": 0,
    }
    assert metric(after) == "paceline_store_degraded 1.0"
    refused = after.admin.post("/admin/v1/keys", json={"name": "not now"})
    assert status_and_code(refused) == (503, "state_unavailable")

    private_redis.start()
    wait_until(lambda: is_connected(after))
    assert metric(after) == "paceline_store_degraded 0.0"
    after.create_key()
    assert after.chat().status_code == 200


def test_f29_a_gateway_that_was_idle_while_redis_was_away_is_well_again_with_it(
    private_redis: RedisServer,
    start_gateway: StartGateway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also what is kept of usage is asked for again, though nothing was used."""
    monkeypatch.setattr("gateway.assembly._USAGE_FLUSH_S", 0.1)
    before = start_gateway()
    key = before.create_key()
    wait_until(lambda: copied(tmp_path / "a", key["id"]))
    before.request_shutdown()
    before.wait_closed()
    private_redis.kill()

    after = start_gateway()
    after.use_key(key["secret"])
    threading.Event().wait(0.5)  # some turns of keeping usage, which find nothing to keep
    assert not is_connected(after)
    private_redis.start()
    wait_until(lambda: is_connected(after))


def test_f29_a_gateway_that_never_knew_the_keys_opens_to_nobody_until_it_does(
    private_redis: RedisServer, start_gateway: StartGateway, keep_joined: KeepJoined
) -> None:
    private_redis.kill()
    gateway = start_gateway()
    keep_joined(gateway)
    assert gateway.chat().status_code == 401
    private_redis.start()
    wait_until(lambda: gateway.chat().status_code == 200)
    wait_until(
        lambda: gateway.admin.get("/admin/v1/policy").headers["x-paceline-policy-version"] == "1"
    )


def _dies(redis: RedisServer) -> None:
    redis.kill()


def _freezes(redis: RedisServer) -> None:
    redis.freeze()


@pytest.mark.parametrize("breaks", [_dies, _freezes])
def test_f30_f31_nobody_waits_for_a_redis_that_is_gone_and_what_is_counted_is_not_lost(
    private_redis: RedisServer,
    start_gateway: StartGateway,
    keep_joined: KeepJoined,
    breaks: BreakRedis,
) -> None:
    gateway = start_gateway()
    keep_joined(gateway)
    assert gateway.chat().status_code == 200
    breaks(private_redis)
    # It says nothing until it is let go on, so whoever waited for it would not come to an end.
    assert [gateway.chat().status_code for _ in range(5)] == [200] * 5
    wait_until(lambda: is_degraded(gateway))
    assert gateway.client.get("/readyz").status_code == 200
    assert gateway.status()["outcomes"] == {"completed": 6}
    if breaks is _dies:
        private_redis.start()
    else:
        private_redis.resume()
    wait_until(lambda: is_connected(gateway))
    other = start_gateway("b")
    wait_until(lambda: other.status()["outcomes"] == {"completed": 6})


def test_f30_without_redis_a_gateway_allows_its_share_and_never_everything(
    private_redis: RedisServer, start_gateway: StartGateway, keep_joined: KeepJoined
) -> None:
    first, second = start_gateway("a"), start_gateway("b")
    keep_joined(first)
    key = first.create_key(requests_a_minute=8)
    wait_until(lambda: second.client.get("/v1/models", headers=bearer_headers(key)).is_success)
    first.use_key(key["secret"])
    second.use_key(key["secret"])
    wait_until(lambda: redis_status(first)["gateways"] == redis_status(second)["gateways"] == 2)
    wait_until(lambda: second.client.get("/readyz").status_code == 200)
    private_redis.kill()
    wait_until(lambda: is_degraded(first) and is_degraded(second))

    def left(gateway: RunningGateway) -> int:
        told = gateway.client.post("/v1/chat/completions", json={}).headers
        return int(told["x-ratelimit-remaining-requests"])

    # Each part notices at its own turn, and another may have been the first.
    wait_until(lambda: max(left(first), left(second)) <= 4)
    for gateway in (first, second):
        served = [gateway.chat().status_code for _ in range(10)].count(200)
        assert 4 <= served <= 5, "half of the limit, and perhaps one that was filled up meanwhile"


def test_f31_a_redis_that_takes_two_seconds_is_as_one_that_is_gone(
    private_redis: RedisServer, start_gateway: StartGateway, keep_joined: KeepJoined
) -> None:
    with running_proxy(private_redis.url.removesuffix("/0")) as proxy:
        gateway = start_gateway("a", through(proxy))
        keep_joined(gateway)
        proxy.fault = Fault(drip_bytes=65536, drip_pause_s=2.0)
        proxy.reset_all()
        wait_until(lambda: is_degraded(gateway))
        assert [gateway.chat().status_code for _ in range(5)] == [200] * 5
        wait_until(lambda: "in time" in str(redis_status(gateway).get("problem")))
        proxy.fault = NO_FAULT
        proxy.reset_all()
        wait_until(lambda: is_connected(gateway))


def test_f31_an_admins_edit_waits_for_a_redis_that_is_slow(
    private_redis: RedisServer, start_gateway: StartGateway
) -> None:
    with running_proxy(private_redis.url.removesuffix("/0")) as proxy:
        proxy.fault = Fault(drip_bytes=65536, drip_pause_s=0.1)
        gateway = start_gateway("a", through(proxy))
        wait_until(lambda: redis_status(gateway)["gateways"] == 1)
        path = "/admin/v1/policy"
        before = gateway.admin.get(path)
        headers = {"if-match": before.headers["etag"], "x-paceline-note": "slowly"}
        edited = gateway.admin.put(path, json=before.json(), headers=headers)
        assert edited.status_code == 200, edited.text
        assert edited.json()["number"] == 2
        key = gateway.create_key()
        assert gateway.admin.delete(f"/admin/v1/keys/{key['id']}").is_success


def test_f31_an_edit_that_was_not_answered_says_so_and_sent_again_it_is_done_once(
    private_redis: RedisServer, start_gateway: StartGateway
) -> None:
    gateway = start_gateway()
    path = "/admin/v1/policy"
    before = gateway.admin.get(path)
    assert before.headers["x-paceline-policy-version"] == "1"
    headers = {"if-match": before.headers["etag"], "x-paceline-note": "two workers"}

    def edit() -> tuple[int, str]:
        document = before.json() | {"prefix": {"max_workers": 2}}
        response = gateway.admin.put(path, json=document, headers=headers)
        return (200, "") if response.is_success else status_and_code(response)

    def edit_while_it_is_frozen() -> tuple[int, str]:
        private_redis.freeze()
        try:
            return edit()
        finally:
            private_redis.resume()

    # On a slow machine it may be known to be away before it is asked.
    wait_until(
        lambda: is_connected(gateway) and edit_while_it_is_frozen() == (503, "write_unconfirmed")
    )
    wait_until(lambda: edit() == (412, "version_conflict"))
    notes = [one["note"] for one in gateway.admin.get(f"{path}/history").json()["versions"]]
    assert notes.count("two workers") == 1


def through(proxy: FaultProxy) -> str:
    return proxy.url.replace("http", "redis") + "/0"


def test_f32_a_gateway_that_is_cut_off_has_its_share_and_everything_adds_up_later(
    private_redis: RedisServer, start_gateway: StartGateway, keep_joined: KeepJoined
) -> None:
    with running_proxy(private_redis.url.removesuffix("/0")) as proxy:
        first, second = start_gateway("a"), start_gateway("b", through(proxy))
        keep_joined(first)
        key = first.create_key(tokens_a_day=200)
        for gateway in (first, second):
            wait_until(
                lambda gateway=gateway: (
                    gateway.client.get(  # type: ignore[misc]
                        "/v1/models", headers=bearer_headers(key)
                    ).is_success
                )
            )
            gateway.use_key(key["secret"])
        wait_until(lambda: redis_status(second)["gateways"] == 2)
        wait_until(lambda: second.client.get("/readyz").status_code == 200)

        def left(gateway: RunningGateway) -> int:
            told = gateway.client.post("/v1/chat/completions", json={}).headers
            return int(told["x-ratelimit-remaining-tokens"])

        proxy.refuse()
        # Each part notices at its own turn, and another may be the first.
        wait_until(lambda: is_degraded(second) and left(second) <= 100)

        cut_off = [second.chat(max_tokens=5).status_code for _ in range(14)].count(200)
        whole = [first.chat(max_tokens=5).status_code for _ in range(5)].count(200)
        assert cut_off <= 10, "half of the budget at most: an answer costs ten tokens"
        assert whole == 5
        assert first.status()["outcomes"].get("completed") == whole

        proxy.listen()
        wait_until(lambda: is_connected(second))
        total = cut_off + whole
        for gateway in (first, second):
            wait_until(
                lambda gateway=gateway: gateway.status()["outcomes"]["completed"] == total  # type: ignore[misc]
            )

        wait_until(lambda: left(first) == left(second) == 200 - 10 * total)


def test_f33_a_redis_that_comes_back_empty_is_told_everything_again(
    private_redis: RedisServer, start_gateway: StartGateway, keep_joined: KeepJoined
) -> None:
    first, second = start_gateway("a"), start_gateway("b")
    keep_joined(first)
    good, bad = first.create_key(), first.create_key()
    first.admin.delete(f"/admin/v1/keys/{bad['id']}")
    for gateway in (first, second):
        gateway.use_key(good["secret"])
        wait_until(lambda gateway=gateway: gateway.chat().status_code == 200)  # type: ignore[misc]
    wait_until(lambda: first.status()["outcomes"] == second.status()["outcomes"])
    private_redis.kill()
    private_redis.start()

    # A Redis that starts quickly may not have been missed yet.
    wait_until(lambda: private_redis.client.hlen("paceline:{keys}:records") > 3)
    for gateway in (first, second):
        wait_until(lambda gateway=gateway: is_connected(gateway))  # type: ignore[misc]
        assert gateway.chat().status_code == 200
        refused = gateway.client.get("/v1/models", headers=bearer_headers(bad))
        assert refused.status_code == 401, "revoked stays revoked"
    third = start_gateway("c")
    third.use_key(good["secret"])
    wait_until(lambda: third.chat().status_code == 200)
    assert third.client.get("/v1/models", headers=bearer_headers(bad)).status_code == 401
    assert third.admin.get("/admin/v1/policy").headers["x-paceline-policy-version"] == "1"
    wait_until(lambda: third.status()["outcomes"] == first.status()["outcomes"])


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
    (_holds_something_else, _is_cleared, "A Redis key of Paceline has another type."),
)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_f34_a_redis_that_refuses_is_a_failure_and_never_an_empty_answer(
    private_redis: RedisServer,
    start_gateway: StartGateway,
    keep_joined: KeepJoined,
    refusal: tuple[BreakRedis, BreakRedis, str],
) -> None:
    breaks, mends, why = refusal
    gateway = start_gateway()
    keep_joined(gateway)
    key = gateway.create_key(requests_a_minute=100)
    gateway.use_key(key["secret"])
    assert gateway.chat().status_code == 200
    breaks(private_redis)
    wait_until(lambda: redis_status(gateway).get("problem") == why)
    assert gateway.chat().status_code == 200
    assert gateway.client.get("/readyz").text == f"ready, degraded: {why}\n"
    assert gateway.client.get("/v1/models", headers={"authorization": "none"}).status_code == 401

    def refused() -> str:
        status, code = status_and_code(
            gateway.admin.post("/admin/v1/keys", json={"name": "not now"})
        )
        assert status == 503
        return code

    # On a slow machine a refusal may come too late to be told from no answer.
    wait_until(lambda: refused() == "state_unavailable")
    mends(private_redis)
    wait_until(lambda: is_connected(gateway))
    gateway.create_key()
    assert gateway.chat().status_code == 200
    other = start_gateway("b")
    other.use_key(key["secret"])
    wait_until(lambda: other.status()["outcomes"] == gateway.status()["outcomes"])
