"""F29 to F32: Redis is down, dies, freezes, is slow, or one of two gateways is cut off from it.

F33 and F34: Redis is there, but empty, full, read-only, or with something else in it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.fault_proxy import HARMLESS, Fault, FaultProxy, proxying
from tests.support.gateway_fixtures import Break, Joins, Starts
from tests.support.redis_server import RedisServer
from tests.support.redis_status import degraded, store, well
from tests.support.running_gateway import RunningGateway, bearing, error_of, eventually


def metric(gateway: RunningGateway) -> str:
    text = gateway.client.get("/metrics").text
    return next(line for line in text.splitlines() if line.startswith("paceline_store_degraded "))


def copied(gateway_folder: Path, word: str) -> bool:
    return any(word in file.read_text() for file in gateway_folder.glob("shared-*.json"))


def test_f29_a_start_without_redis_serves_the_keys_that_were_known_and_heals(
    own_redis: RedisServer, starts: Starts, joins: Joins, tmp_path: Path
) -> None:
    before = starts()
    good, bad = before.make_key(), before.make_key()
    before.bear(good["secret"])
    assert before.admin.delete(f"/admin/v1/keys/{bad['id']}").is_success
    eventually(lambda: copied(tmp_path / "a", "revoked_at"))
    before.ask_to_end()
    before.wait_for_end()
    own_redis.kill()

    after = starts()
    joins(after)
    assert after.chat().status_code == 401
    after.bear(bad["secret"])
    assert after.chat().status_code == 401, "revoked stays revoked"
    after.bear(good["secret"])
    assert after.chat().status_code == 200
    ready = after.client.get("/readyz")
    assert (ready.status_code, ready.text) == (200, "ready, degraded: Redis cannot be reached.\n")
    assert store(after) == {
        "kind": "redis",
        "state": "degraded",
        "why": "Redis cannot be reached.",
        "gateways": 0,
    }
    assert metric(after) == "paceline_store_degraded 1.0"
    refused = after.admin.post("/admin/v1/keys", json={"name": "not now"})
    assert error_of(refused) == (503, "state_unavailable")

    own_redis.start()
    eventually(lambda: well(after))
    assert metric(after) == "paceline_store_degraded 0.0"
    after.make_key()
    assert after.chat().status_code == 200


def test_f29_a_gateway_that_was_idle_while_redis_was_away_is_well_again_with_it(
    own_redis: RedisServer, starts: Starts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what is kept of usage is asked for again, though nothing was used."""
    monkeypatch.setattr("gateway.auth.usage_store._FLUSH_S", 0.1)
    before = starts()
    key = before.make_key()
    eventually(lambda: copied(tmp_path / "a", key["id"]))
    before.ask_to_end()
    before.wait_for_end()
    own_redis.kill()

    after = starts()
    after.bear(key["secret"])
    threading.Event().wait(0.5)  # some turns of keeping usage, which find nothing to keep
    assert not well(after)
    own_redis.start()
    eventually(lambda: well(after))


def test_f29_a_gateway_that_never_knew_the_keys_opens_to_nobody_until_it_does(
    own_redis: RedisServer, starts: Starts, joins: Joins
) -> None:
    own_redis.kill()
    gateway = starts()
    joins(gateway)
    assert gateway.chat().status_code == 401
    own_redis.start()
    eventually(lambda: gateway.chat().status_code == 200)
    eventually(
        lambda: gateway.admin.get("/admin/v1/policy").headers["x-paceline-policy-version"] == "1"
    )


def _dies(redis: RedisServer) -> None:
    redis.kill()


def _freezes(redis: RedisServer) -> None:
    redis.freeze()


@pytest.mark.parametrize("breaks", [_dies, _freezes])
def test_f30_f31_nobody_waits_for_a_redis_that_is_gone_and_what_is_counted_is_not_lost(
    own_redis: RedisServer, starts: Starts, joins: Joins, breaks: Break
) -> None:
    gateway = starts()
    joins(gateway)
    assert gateway.chat().status_code == 200
    breaks(own_redis)
    # It says nothing until it is let go on, so whoever waited for it would not come to an end.
    assert [gateway.chat().status_code for _ in range(5)] == [200] * 5
    eventually(lambda: degraded(gateway))
    assert gateway.client.get("/readyz").status_code == 200
    assert gateway.status()["outcomes"] == {"completed": 6}
    if breaks is _dies:
        own_redis.start()
    else:
        own_redis.thaw()
    eventually(lambda: well(gateway))
    other = starts("b")
    eventually(lambda: other.status()["outcomes"] == {"completed": 6})


def test_f30_without_redis_a_gateway_allows_its_share_and_never_everything(
    own_redis: RedisServer, starts: Starts, joins: Joins
) -> None:
    first, second = starts("a"), starts("b")
    joins(first)
    key = first.make_key(requests_a_minute=8)
    eventually(lambda: second.client.get("/v1/models", headers=bearing(key)).is_success)
    first.bear(key["secret"])
    second.bear(key["secret"])
    eventually(lambda: store(first)["gateways"] == store(second)["gateways"] == 2)
    eventually(lambda: second.client.get("/readyz").status_code == 200)
    own_redis.kill()
    eventually(lambda: degraded(first) and degraded(second))

    def left(gateway: RunningGateway) -> int:
        told = gateway.client.post("/v1/chat/completions", json={}).headers
        return int(told["x-ratelimit-remaining-requests"])

    # Each part notices at its own turn, and another may have been the first.
    eventually(lambda: max(left(first), left(second)) <= 4)
    for gateway in (first, second):
        served = [gateway.chat().status_code for _ in range(10)].count(200)
        assert 4 <= served <= 5, "half of the limit, and perhaps one that was filled up meanwhile"


def test_f31_a_redis_that_takes_two_seconds_is_as_one_that_is_gone(
    own_redis: RedisServer, starts: Starts, joins: Joins
) -> None:
    with proxying(own_redis.url.removesuffix("/0")) as proxy:
        gateway = starts("a", through(proxy))
        joins(gateway)
        proxy.fault = Fault(drip_bytes=65536, drip_pause_s=2.0)
        proxy.reset_all()
        eventually(lambda: degraded(gateway))
        assert [gateway.chat().status_code for _ in range(5)] == [200] * 5
        eventually(lambda: "in time" in str(store(gateway).get("why")))
        proxy.fault = HARMLESS
        proxy.reset_all()
        eventually(lambda: well(gateway))


def test_f31_an_edit_that_was_not_answered_says_so_and_sent_again_it_is_done_once(
    own_redis: RedisServer, starts: Starts
) -> None:
    gateway = starts()
    path = "/admin/v1/policy"
    before = gateway.admin.get(path)
    assert before.headers["x-paceline-policy-version"] == "1"
    headers = {"if-match": before.headers["etag"], "x-paceline-note": "two holders"}

    def edit() -> tuple[int, str]:
        document = before.json() | {"prefix": {"holders": 2}}
        answer = gateway.admin.put(path, json=document, headers=headers)
        return (200, "") if answer.is_success else error_of(answer)

    def edit_while_it_is_frozen() -> tuple[int, str]:
        own_redis.freeze()
        try:
            return edit()
        finally:
            own_redis.thaw()

    # On a slow machine it may be known to be away before it is asked.
    eventually(lambda: well(gateway) and edit_while_it_is_frozen() == (503, "edit_unanswered"))
    eventually(lambda: edit() == (412, "policy_changed"))
    notes = [one["note"] for one in gateway.admin.get(f"{path}/history").json()["versions"]]
    assert notes.count("two holders") == 1


def through(proxy: FaultProxy) -> str:
    return proxy.url.replace("http", "redis") + "/0"


def test_f32_a_gateway_that_is_cut_off_has_its_share_and_everything_adds_up_later(
    own_redis: RedisServer, starts: Starts, joins: Joins
) -> None:
    with proxying(own_redis.url.removesuffix("/0")) as proxy:
        first, second = starts("a"), starts("b", through(proxy))
        joins(first)
        key = first.make_key(tokens_a_day=200)
        for gateway in (first, second):
            eventually(
                lambda gateway=gateway: (
                    gateway.client.get(  # type: ignore[misc]
                        "/v1/models", headers=bearing(key)
                    ).is_success
                )
            )
            gateway.bear(key["secret"])
        eventually(lambda: store(second)["gateways"] == 2)
        eventually(lambda: second.client.get("/readyz").status_code == 200)

        def left(gateway: RunningGateway) -> int:
            told = gateway.client.post("/v1/chat/completions", json={}).headers
            return int(told["x-ratelimit-remaining-tokens"])

        proxy.refuse()
        # Each part notices at its own turn, and another may be the first.
        eventually(lambda: degraded(second) and left(second) <= 100)

        cut_off = [second.chat(max_tokens=5).status_code for _ in range(14)].count(200)
        whole = [first.chat(max_tokens=5).status_code for _ in range(5)].count(200)
        assert cut_off <= 10, "half of the budget at most: an answer costs ten tokens"
        assert whole == 5
        assert first.status()["outcomes"].get("completed") == whole

        proxy.listen()
        eventually(lambda: well(second))
        total = cut_off + whole
        for gateway in (first, second):
            eventually(
                lambda gateway=gateway: gateway.status()["outcomes"]["completed"] == total  # type: ignore[misc]
            )

        eventually(lambda: left(first) == left(second) == 200 - 10 * total)


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
