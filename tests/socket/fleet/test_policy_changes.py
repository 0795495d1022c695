"""Policy changes under load: a request completes under the policy of its arrival."""

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from gateway.errors import QueueFull, QueueTimeout
from gateway.fleet.circuit_breaker import AttemptResult
from policies.document import read_policy
from tests.support.policies import PolicyAdmin, single_pool_policy
from tests.support.request_profiles import SAMPLED
from tests.support.running_gateway import RunningGateway, chat_body, wait_until
from tests.support.scheduler_harness import (
    SchedulerHarness,
    cancel_all,
    run_ready_tasks,
    worker_report,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, both_lanes


def queued(gateway: RunningGateway) -> int:
    """Return the number of queued requests, over all pools, removed ones included."""
    status = gateway.status()
    running = sum(lane["in_flight"] for lane in status["workers"]["fake-a"]["lanes"].values())
    return status["gateway"]["requests_in_flight"] - running


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_f48_a_queued_request_keeps_its_pool_and_later_requests_get_the_new_one(
    gateway: RunningGateway, worker: ScriptedWorker, admin: PolicyAdmin
) -> None:
    gateway.join_with(worker, *both_lanes(slots=1))
    admin.put(single_pool_policy("before"))
    worker.scripts_by_message["hold"] = Script(hang=True)
    with ThreadPoolExecutor(8) as executor:
        running = executor.submit(gateway.chat, **user("hold"))
        assert worker.request_received.wait(60)
        early = [executor.submit(gateway.chat) for _ in range(3)]
        wait_until(lambda: queued(gateway) == 3)
        assert admin.put(single_pool_policy("after")).status_code == 200
        assert "before" not in gateway.status()["pools"]
        late = [executor.submit(gateway.chat) for _ in range(3)]
        wait_until(lambda: queued(gateway) == 6)
        worker.resume.set()
        responses = [one.result() for one in (running, *early, *late)]
    pools = [response.headers["x-paceline-pool"] for response in responses]
    assert pools == ["before"] * 4 + ["after"] * 3
    assert gateway.status()["outcomes"] == {"completed": 7}


def test_f48_a_retry_uses_the_policy_of_the_first_attempt(
    gateway, worker, second_worker, admin
) -> None:
    admin.put(single_pool_policy("before"))
    gateway.join_with(worker, *both_lanes(slots=1))
    worker.script = Script(hang=True, status=503)
    with ThreadPoolExecutor(1) as executor:
        request = executor.submit(gateway.chat)
        assert worker.request_received.wait(60)
        gateway.join(second_worker)
        admin.put(single_pool_policy("after"))
        worker.resume.set()  # the worker returns 503
        response = request.result()
    assert response.status_code == 200
    headers = [response.headers[f"x-paceline-{name}"] for name in ("pool", "worker", "attempts")]
    assert headers == ["before", "fake-b", "2"]
    assert gateway.chat().headers["x-paceline-pool"] == "after"


def test_f48_every_request_succeeds_while_pools_change_under_load(
    gateway, worker, second_worker, admin
) -> None:
    workers = (worker, second_worker)
    documents = [single_pool_policy(name, limit=1000) for name in ("a", "b", "c")]
    admin.put(documents[0])
    for member in workers:
        gateway.join_with(member, *both_lanes(slots=2))
    stop = threading.Event()
    pool_counts: Counter[str] = Counter()

    def send_requests(seed: int) -> None:
        rng = Random(seed)
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            while not stop.is_set():
                body = chat_body(stream=rng.random() < 0.5)
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                assert response.content.endswith(DONE) == body["stream"]
                pool_counts[response.headers["x-paceline-pool"]] += 1

    def send_heartbeats() -> None:
        while not stop.wait(1.0):
            for member in workers:
                gateway.join_with(member, *both_lanes(slots=2))

    with ThreadPoolExecutor(9) as executor:
        futures = [executor.submit(send_heartbeats)]
        futures += [executor.submit(send_requests, seed) for seed in range(8)]
        try:
            for number, document in zip(range(12), itertools.cycle(documents), strict=False):
                assert admin.put(document).status_code == 200
                assert admin.post("/diff", documents[number % 2])["decisions"] >= 0
        finally:
            stop.set()
        for future in futures:
            future.result()
    assert set(pool_counts) == {"a", "b", "c"}
    status = gateway.status()
    assert status["outcomes"] == {"completed": sum(pool_counts.values())}
    assert status["policy"]["version"] == 14
    for entry in status["workers"].values():
        assert [lane["in_flight"] for lane in entry["lanes"].values()] == [0, 0]


async def test_a_queued_request_has_the_queue_limits_of_its_own_policy() -> None:
    harness = SchedulerHarness(
        read_policy(single_pool_policy("a", limit=3, timeout_s=30.0), "test")
    )
    harness.fleet.heartbeat(worker_report())
    running = await harness.acquire()
    patient = [harness.acquire() for _ in range(2)]
    await run_ready_tasks()
    harness.policy = read_policy(single_pool_policy("a", limit=2, timeout_s=30.0), "test")
    with pytest.raises(QueueFull):
        await harness.acquire()
    harness.policy = read_policy(single_pool_policy("a", limit=9, timeout_s=0.01), "test")
    with pytest.raises(QueueTimeout):
        await harness.acquire()
    assert not any(task.done() for task in patient)
    harness.dispatch.release(running, AttemptResult.SUCCEEDED)
    lease = await patient[0]
    await cancel_all(patient[1:])
    harness.dispatch.release(lease, AttemptResult.SUCCEEDED)
    assert harness.slots_in_use() == 0


async def test_a_route_of_the_same_name_in_another_policy_blocks_no_request() -> None:
    harness = SchedulerHarness(read_policy(single_pool_policy("a"), "test"))
    harness.fleet.heartbeat(worker_report())
    running = await harness.acquire()
    blocked = harness.acquire()
    await run_ready_tasks()
    harness.policy = read_policy(single_pool_policy("a", lanes=("text-mtp", "vlm")), "test")
    free = harness.acquire(SAMPLED._replace(sampling=SAMPLED.sampling._replace(temperature=0)))
    assert (await free).candidate.lane == "text-mtp"
    assert not blocked.done()
    harness.dispatch.release(running, AttemptResult.SUCCEEDED)
    assert (await blocked).candidate.lane == "vlm"
