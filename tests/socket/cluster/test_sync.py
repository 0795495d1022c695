"""Several gateways over one Redis are one: their workers, their counts, and what Redis holds.

What admins decide at one gateway holds at all that share its Redis: keys, limits, the policy.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway_fixtures import MakeClusterGateway
from tests.support.gateway_process import running_gateway_process
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import (
    RunningGateway,
    chat_body,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, lane_report

ROOT = Path(__file__).parents[3]


def completed(gateway: RunningGateway) -> int:
    count: int = gateway.status()["outcomes"].get("completed", 0)
    return count


def test_a_worker_that_joins_one_gateway_serves_at_all_and_leaves_all(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    assert first.send_heartbeat(worker).status_code == 200
    wait_until(lambda: second.client.get("/readyz").status_code == 200)
    assert second.chat().status_code == 200
    third = make_cluster_gateway()
    wait_until(lambda: third.client.get("/readyz").status_code == 200)

    assert first.remove_worker(worker).status_code == 204
    for gateway in (second, third):
        wait_until(lambda gateway=gateway: gateway.client.get("/readyz").status_code == 503)  # type: ignore[misc]


def test_a_worker_that_dies_is_out_everywhere(make_cluster_gateway: MakeClusterGateway) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    fake = ScriptedWorker()
    with running_server(fake, sockets=[fake.socket]):
        first.send_heartbeat(fake)
        wait_until(lambda: second.client.get("/readyz").status_code == 200)
    for gateway in (first, second):
        wait_until(lambda gateway=gateway: not gateway.status()["pools"]["vlm"]["slots"])  # type: ignore[misc]


def test_a_worker_outlives_the_gateway_that_it_joined(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.send_heartbeat(worker)
    wait_until(lambda: second.client.get("/readyz").status_code == 200)
    first.request_shutdown()
    first.wait_closed()
    threading.Event().wait(9)  # longer than any silence that is forgiven
    assert second.chat().status_code == 200


def test_counts_and_reports_are_sums_over_gateways_and_their_lives(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.send_heartbeat(worker)
    wait_until(lambda: second.client.get("/readyz").status_code == 200)
    for gateway in (first, second, second):
        assert gateway.chat().status_code == 200
    wait_until(lambda: completed(first) == completed(second) == 3)
    assert second.status()["store"] == {
        "kind": "redis",
        "state": "ok",
        "problem": "",
        "gateways": 2,
    }
    assert second.status()["workers"]["fake-a"]["boots"] == 1

    first.request_shutdown()
    first.wait_closed()
    third = make_cluster_gateway()
    wait_until(lambda: completed(third) == 3)
    wait_until(lambda: third.client.get("/readyz").status_code == 200)
    assert third.chat(model="no such").status_code == 404
    wait_until(lambda: second.status()["errors"] == {"model_not_found": 1})


def test_redis_holds_documented_keys_alone_and_those_that_can_go_stale_end_by_themselves(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker, redis: RedisServer
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.send_heartbeat(worker)
    key = first.create_key(requests_a_minute=100)
    wait_until(lambda: second.chat().status_code == 401)
    first.use_key(key["secret"])
    system = {"role": "system", "content": "You are the clerk of a small harbour. " * 10}
    asked = [system, {"role": "user", "content": "Say a word."}]
    assert first.chat(messages=asked).status_code == 200
    assert first.admin.put("/admin/v1/workers/fake-a/cordon").is_success

    page = (ROOT / "docs" / "redis.md").read_text()
    documented = set(re.findall(r"^\| `(paceline:[^`]+)` \|", page, re.MULTILINE))
    wanted = {name for name in documented if not name.endswith((":NAME", "usage}:records"))}
    wait_until(lambda: wanted <= set(redis.client.keys("*")))
    found = {re.sub(":folded:.*", ":folded:NAME", str(name)) for name in redis.client.keys("*")}
    assert found <= documented
    for name in (
        "{rate_limits}:admitted",
        "{rate_limits}:gateways",
        "{workers}:updates",
        "{prefixes}:claims",
    ):
        assert redis.client.pttl(f"paceline:{name}") > 0, name


CORDON = "/admin/v1/workers/fake-a/cordon"
DRAIN = "/admin/v1/workers/fake-a/drain"


def state_of(gateway: RunningGateway, worker_id: str = "fake-a") -> str:
    listed = gateway.admin.get("/admin/v1/workers").json()["workers"]
    states: dict[str, str] = {one["worker_id"]: one["state"] for one in listed}
    return states[worker_id]


def test_of_two_gateways_the_last_word_on_a_cordon_counts_at_both(
    make_cluster_gateway: MakeClusterGateway, keep_joined: Callable[[RunningGateway], None]
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    keep_joined(first)
    wait_until(lambda: second.client.get("/readyz").is_success)
    assert first.admin.put(CORDON).is_success
    # The other one lifts it at once, before a look of its own has told it of the cordon.
    assert second.admin.delete(CORDON).status_code == 204
    wait_until(lambda: state_of(first) == state_of(second) == "ready")
    assert second.admin.put(CORDON).is_success
    assert first.admin.put(CORDON).is_success, "cordoned twice is cordoned once"
    assert first.admin.delete(CORDON).status_code == 204
    wait_until(lambda: state_of(first) == state_of(second) == "ready")
    assert first.chat().status_code == second.chat().status_code == 200


def test_a_worker_is_drained_once_it_has_nothing_of_any_gateway(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.send_heartbeat(worker)
    wait_until(lambda: second.client.get("/readyz").is_success)
    worker.script = Script(hang_after=1)
    busy = [lane_report("vlm", running=1).model_dump()]
    with first.stream() as response, ThreadPoolExecutor(1) as executor:
        pieces = response.iter_raw()
        next(pieces)
        worker.status_report = worker.report(lanes=busy)
        soon = second.admin.post(DRAIN, params={"timeout_s": "2"}).json()
        assert (soon["drained"], soon["in_flight"]) == (False, 0), "another one's stream runs there"
        drained = executor.submit(second.admin.post, DRAIN)
        worker.resume.set()
        assert b"".join(pieces).endswith(DONE)
        worker.status_report = None
        assert drained.result().json()["drained"]


def test_a_drain_ends_where_the_cordon_is_lifted_at_another_gateway(
    make_cluster_gateway: MakeClusterGateway,
    worker: ScriptedWorker,
    keep_joined: Callable[[RunningGateway], None],
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    keep_joined(first)
    wait_until(lambda: second.client.get("/readyz").is_success)
    worker.script = Script(hang_after=1)
    with first.stream() as response, ThreadPoolExecutor(1) as executor:
        pieces = response.iter_raw()
        next(pieces)
        drained = executor.submit(first.admin.post, DRAIN, params={"timeout_s": "600"})
        wait_until(lambda: state_of(second) == "cordoned")
        assert second.admin.delete(CORDON).status_code == 204
        assert not drained.result().json()["drained"]
        worker.resume.set()
        assert b"".join(pieces).endswith(DONE)


def test_gateways_that_are_killed_under_load_lose_and_double_nothing_that_was_told(
    redis: RedisServer, tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    """What a gateway counted in the half second before its SIGKILL is all that goes."""

    def asked(client: httpx.Client, times: int) -> int:
        """Ask so often at a time; count the answers."""

        def one(_turn: int) -> int:
            with contextlib.suppress(httpx.HTTPError):
                return client.post("/v1/chat/completions", json=chat_body()).status_code == 200
            return 0

        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(one, range(times)))

    def told(client: httpx.Client) -> int:
        status: dict[str, Any] = client.get("/v1/status").json()
        count: int = status["outcomes"].get("completed", 0)
        return count

    def start(name: str, joining: ScriptedWorker) -> contextlib.AbstractContextManager[Any]:
        return running_gateway_process(tmp_path / name, joining, REDIS_URL=redis.url)

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    lost = 0
    with start("a", worker) as (first, at_first), start("b", second_worker) as (second, at_second):
        sure = asked(at_first, 30) + asked(at_second, 30)
        assert sure == 60
        wait_until(lambda: told(at_first) == told(at_second) == sure)

        with ThreadPoolExecutor(1) as beside:
            responses = beside.submit(asked, at_first, 3000)
            wait_until(lambda: told(at_second) > sure)
            first.process.kill()
            first.wait_for_end()
            answered = responses.result()
        threading.Event().wait(1.5)
        known = told(at_second)
        # A request that was counted may have lost its client in the same moment.
        assert sure < known <= sure + answered + 4
        lost = sure + answered - known

        with start("a", worker) as (_, again):
            wait_until(lambda: told(again) == known)
            more = asked(again, 20) + asked(at_second, 20)
            assert more == 40
            wait_until(lambda: told(again) == told(at_second) == known + more)
            second.process.kill()
            second.wait_for_end()
            assert asked(again, 10) == 10
            wait_until(lambda: told(again) == known + more + 10)
    assert lost < answered


def soon_at(gateway: RunningGateway, holds: Callable[[], bool]) -> None:
    """Wait for what is to hold within two seconds, not counting those in which Redis was away."""
    left_s, until_s, began_s = 2.0, time.monotonic() + 60, time.monotonic()
    while not holds():
        time.sleep(0.02)
        responses = "paceline_store_degraded 0.0" in gateway.client.get("/metrics").text
        since_s, began_s = began_s, time.monotonic()
        left_s -= began_s - since_s if responses else 0.0
        assert left_s > 0, "it did not come true in time"
        assert began_s < until_s, "Redis is away"


def test_a_key_that_is_revoked_at_one_gateway_opens_no_other(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.send_heartbeat(worker)
    key = first.create_key()
    wait_until(lambda: second.chat().status_code == 401)
    second.use_key(key["secret"])
    wait_until(lambda: second.chat().status_code == 200)
    assert first.admin.delete(f"/admin/v1/keys/{key['id']}").is_success
    soon_at(second, lambda: second.chat().status_code == 401)


def test_the_policy_of_one_is_the_policy_of_all(make_cluster_gateway: MakeClusterGateway) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    now = first.admin.get("/admin/v1/policy")
    changed = first.admin.patch(
        "/admin/v1/policy",
        content=json.dumps({"models": {"other": {}}}),
        headers={
            "content-type": "application/merge-patch+json",
            "if-match": now.headers["etag"],
            "x-paceline-author": "tests",
            "x-paceline-note": "see it at the other",
        },
    )
    assert changed.status_code == 200, changed.text

    def followed() -> bool:
        told = second.admin.get("/admin/v1/policy")
        return bool(told.headers["etag"].strip('"') == changed.json()["etag"])

    soon_at(second, followed)


def two_with_one_key(
    makes: MakeClusterGateway, worker: ScriptedWorker, **limits: int
) -> tuple[RunningGateway, RunningGateway]:
    """Give two gateways that share a worker, and ask with a key of these limits from now on."""
    first, second = makes(), makes()
    first.send_heartbeat(worker)
    secret = first.create_key(**limits)["secret"]
    wait_until(lambda: second.chat().status_code == 401)
    first.use_key(secret)
    second.use_key(secret)
    return first, second


def test_a_limit_is_one_over_all_gateways(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = two_with_one_key(
        make_cluster_gateway, worker, requests_a_minute=6, concurrent_requests=5
    )
    assert [first.chat().status_code for _ in range(4)] == [200] * 4

    def told() -> bool:
        left = second.client.post("/v1/chat/completions", json={}).headers
        return dict(left).get("x-ratelimit-remaining-requests") == "2"

    wait_until(told)
    responses = [second.chat() for _ in range(4)]
    assert [response.status_code for response in responses].count(200) == 2
    assert status_and_code(responses[-1]) == (429, "requests_a_minute_exceeded")


def test_a_daily_budget_is_one_over_all_gateways(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = two_with_one_key(make_cluster_gateway, worker, tokens_a_day=100)
    assert [first.chat(max_tokens=5).status_code for _ in range(8)] == [200] * 8

    def told() -> bool:
        left = second.client.post("/v1/chat/completions", json={}).headers
        return dict(left).get("x-ratelimit-remaining-tokens") == "20"

    wait_until(told)
    assert second.chat(max_tokens=5).status_code == 200
    assert status_and_code(second.chat(max_tokens=20)) == (429, "tokens_a_day_exceeded")


def test_requests_at_once_are_counted_over_all_gateways(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = two_with_one_key(make_cluster_gateway, worker, concurrent_requests=1)
    worker.script = Script(hang_after=1)
    with first.stream() as response:
        pieces = response.iter_raw()
        next(pieces)
        worker.script = Script()
        wait_until(lambda: second.chat().status_code == 429)
        worker.resume.set()
        assert b"".join(pieces).endswith(DONE)
    wait_until(lambda: second.chat().status_code == 200)
