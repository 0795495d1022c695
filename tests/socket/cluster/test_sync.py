"""Several gateways over one Redis: workers, counts, keys, limits, policy and cordons are shared."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.assembly import TIMING
from gateway.fleet import registry
from tests.support import pairing
from tests.support.fake_clock import MovedClock
from tests.support.gateway_fixtures import QUICK, SILENCE_S, MakeClusterGateway, remove_settings
from tests.support.heartbeats import send_heartbeats
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.redis_server import RedisServer
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_worker,
    wait_until,
    wait_until_all,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, lane_report

Pair = tuple[RunningGateway, RunningGateway]
ROOT = Path(__file__).parents[3]


def is_ready(gateway: RunningGateway) -> bool:
    return gateway.client.get("/readyz").status_code == 200


def test_a_worker_registered_at_one_gateway_serves_all_until_it_deregisters(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.join(worker)
    wait_until(lambda: is_ready(second))
    assert second.chat().status_code == 200
    third = make_cluster_gateway()
    wait_until(lambda: is_ready(third))

    assert first.remove_worker(worker).status_code == 204
    wait_until_all((second, third), lambda one: not is_ready(one))


@pytest.fixture
def moved_pair(make_cluster_gateway, monkeypatch) -> tuple[Pair, MovedClock]:
    """Return two gateways and their clock, whose moves are no stalls of an event loop."""
    monkeypatch.setattr(registry, "_STALL_S", float("inf"))
    clock = MovedClock()
    timing = replace(QUICK, clock=clock)
    return (make_cluster_gateway(timing), make_cluster_gateway(timing)), clock


def test_a_crashed_worker_is_unavailable_at_all_gateways(moved_pair) -> None:
    (first, second), clock = moved_pair
    with running_worker() as crashing:
        first.join(crashing)
        wait_until(lambda: is_ready(second))

    def is_without_slots(gateway: RunningGateway) -> bool:
        clock.advance(SILENCE_S)  # again, for a report on its way counts from when it is read
        return not gateway.status()["pools"]["vlm"]["slots"]

    wait_until_all((first, second), is_without_slots)


def test_a_worker_stays_available_after_its_gateway_shut_down(moved_pair, worker) -> None:
    (first, second), clock = moved_pair
    first.join(worker)
    wait_until(lambda: is_ready(second))
    first.shut_down()
    for _ in range(2):  # each shorter than the heartbeat timeout, and longer together
        asked = len(worker.authorizations)
        clock.advance(SILENCE_S * 0.6)
        wait_until(lambda asked=asked: len(worker.authorizations) > asked)  # type: ignore[misc]
    wait_until(lambda: second.chat().status_code == 200)


def test_gateways_read_what_others_write_within_the_documented_time() -> None:
    assert TIMING.refresh_s < 2


def test_redis_contains_only_documented_keys_and_transient_ones_expire(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker, redis: RedisServer
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    first.join(worker)
    key = first.create_key(requests_a_minute=100)
    wait_until(lambda: second.chat().status_code == 401)
    first.use_key(key["secret"])
    system = {"role": "system", "content": "You are the clerk of a small harbour. " * 10}
    messages = [system, {"role": "user", "content": "Say a word."}]
    assert first.chat(messages=messages).status_code == 200
    kept = first.client.post("/v1/responses", json={"model": "demo", "input": "Hi"}).json()
    then = {"model": "demo", "input": "And?", "previous_response_id": kept["id"]}
    second.join(worker)
    assert second.client.post(
        "/v1/responses", json=then, headers=first.client.headers
    ).is_success, "a response goes on at any gateway"
    assert first.admin.put("/admin/v1/workers/fake-a/cordon").is_success
    pairing.pair(first, pairing.show_code(first), "fake-b")

    page = (ROOT / "docs" / "redis.md").read_text()
    documented = set(re.findall(r"^\| `(paceline:[^`]+)` \|", page, re.MULTILINE))
    endings = (":NAME", ":KEY", "usage}:records")
    expected = {name for name in documented if not name.endswith(endings)}
    wait_until(lambda: expected <= set(redis.client.keys("*")))
    found = {re.sub(":folded:.*", ":folded:NAME", str(name)) for name in redis.client.keys("*")}
    found = {re.sub("kept:[0-9a-f]{16}", "kept:KEY", name) for name in found}
    assert {re.sub("kept:KEY:[0-9a-f]{32}", "kept:KEY:NAME", name) for name in found} <= documented
    assert all(redis.client.pttl(str(name)) > 0 for name in redis.client.keys("*{responses}*"))
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
    workers = gateway.admin.get("/admin/v1/workers").json()["workers"]
    states: dict[str, str] = {worker["worker_id"]: worker["state"] for worker in workers}
    return states[worker_id]


@pytest.fixture(scope="module")
def running_pair(tmp_path_factory, module_worker) -> Iterator[Pair]:
    """Run two gateways over a Redis of their own; a worker joins the first one."""
    folder = tmp_path_factory.mktemp("pair")
    server = RedisServer(folder)
    server.start()
    with ExitStack() as stack:
        stack.callback(server.kill)
        remove_settings(stack.enter_context(pytest.MonkeyPatch.context()))
        first, second = (
            stack.enter_context(
                RunningGateway(make_settings(folder / name, redis_url=SecretStr(server.url)), QUICK)
            )
            for name in "ab"
        )
        stack.enter_context(send_heartbeats(first, module_worker))
        use_keys((first, second))
        yield first, second


@pytest.fixture
def pair(running_pair: Pair, module_worker: ScriptedWorker) -> Pair:
    """Return two gateways with clients that use an unlimited key, and a worker at both."""
    module_worker.reset()
    use_keys(running_pair)
    running_pair[0].admin.delete(CORDON)
    wait_until_all(running_pair, lambda one: state_of(one) == "ready")
    return running_pair


def use_keys(pair: Pair, **limits: int) -> dict[str, Any]:
    """Create a key that the clients of both gateways use from now on."""
    key = pair[0].create_key(**limits)
    for gateway in pair:
        gateway.use_key("none")
    # Until it has read the first key, a gateway is open.
    wait_until_all(pair, lambda one: one.chat(model="").status_code == 401)
    for gateway in pair:
        gateway.use_key(key["secret"])
    wait_until_all(pair, lambda one: one.client.get("/v1/models").is_success)
    return key


def test_the_last_cordon_or_uncordon_applies_at_both_gateways(pair: Pair) -> None:
    first, second = pair
    assert first.admin.put(CORDON).is_success
    # The second gateway removes the cordon before its periodic refresh has loaded it.
    assert second.admin.delete(CORDON).status_code == 204
    wait_until(lambda: state_of(first) == state_of(second) == "ready")
    assert second.admin.put(CORDON).is_success
    assert first.admin.put(CORDON).is_success, "a second cordon changes nothing"
    assert first.admin.delete(CORDON).status_code == 204
    wait_until(lambda: state_of(first) == state_of(second) == "ready")
    assert first.chat().status_code == second.chat().status_code == 200


def test_a_worker_is_drained_once_no_gateway_has_a_request_on_it(pair, module_worker) -> None:
    (first, second), worker = pair, module_worker
    assert second.chat().is_success, "its next report of the worker may be about this request"
    worker.script = Script(hang_after=1)
    busy = [lane_report("vlm", running=1)]
    with first.stream() as response, ThreadPoolExecutor(1) as executor:
        chunks = response.iter_raw()
        next(chunks)
        worker.status_report = worker.report(lanes=busy)
        timed_out = second.admin.post(DRAIN, params={"timeout_s": "1"}).json()
        assert (timed_out["drained"], timed_out["in_flight"]) == (False, 0), (
            "a stream of the first gateway is running"
        )
        drained = executor.submit(second.admin.post, DRAIN)
        worker.resume.set()
        assert b"".join(chunks).endswith(DONE)
        worker.status_report = None
        assert drained.result().json()["drained"]


def test_a_drain_waits_until_other_gateways_have_read_the_cordon(
    make_cluster_gateway: MakeClusterGateway, worker: ScriptedWorker
) -> None:
    gateway = make_cluster_gateway(replace(QUICK, refresh_s=0.45))  # 1.1 s for two, and a margin
    gateway.join(worker)
    assert not gateway.admin.post(DRAIN, params={"timeout_s": "1"}).json()["drained"]


def test_a_drain_ends_when_another_gateway_uncordons_the_worker(pair, module_worker) -> None:
    (first, second), worker = pair, module_worker
    worker.script = Script(hang_after=1)
    with first.stream() as response, ThreadPoolExecutor(1) as executor:
        chunks = response.iter_raw()
        next(chunks)
        drained = executor.submit(first.admin.post, DRAIN, params={"timeout_s": "600"})
        wait_until(lambda: state_of(second) == "cordoned")
        assert second.admin.delete(CORDON).status_code == 204
        assert not drained.result().json()["drained"]
        worker.resume.set()
        assert b"".join(chunks).endswith(DONE)


def test_a_policy_edit_at_one_gateway_applies_at_the_other_with_the_text_of_its_author(
    make_cluster_gateway: MakeClusterGateway,
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    text = f"# für alle\n{to_yaml(single_pool_policy('slow'))}"
    with (
        PolicyAdmin(first.url, first.admin_key) as author,
        PolicyAdmin(second.url, second.admin_key) as reader,
    ):
        changed = author.put(text)
        assert changed.status_code == 200, changed.text
        wait_until(lambda: reader.etag().strip('"') == changed.json()["etag"])
        assert reader.get(headers={"accept": "application/yaml"}).text == text


def test_a_concurrency_limit_applies_over_all_gateways(pair, module_worker) -> None:
    (first, second), worker = pair, module_worker
    use_keys(pair, concurrent_requests=1)
    worker.script = Script(hang_after=1)
    with first.stream() as response:
        chunks = response.iter_raw()
        next(chunks)
        worker.script = Script()
        wait_until(lambda: second.chat().status_code == 429)
        worker.resume.set()
        assert b"".join(chunks).endswith(DONE)
    wait_until(lambda: second.chat().status_code == 200)
