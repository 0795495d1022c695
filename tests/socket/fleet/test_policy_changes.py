"""A policy that changes under load: each request keeps its own, and none is stranded."""

from __future__ import annotations

import asyncio
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
from gateway.routing.select import RoutingRequest
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
from tests.support.scripted_worker import Script, ScriptedWorker, lane_report


def join(gateway: RunningGateway, worker: ScriptedWorker, *, slots: int) -> None:
    lanes = [lane_report(name, slots=slots).model_dump() for name in ("text-mtp", "vlm")]
    worker.status_report = worker.report(lanes=lanes)
    assert gateway.send_heartbeat(worker, lanes=lanes).status_code == 200


def in_line(gateway: RunningGateway) -> int:
    """Count all who wait, whatever pools there are now."""
    status = gateway.status()
    running = sum(one["in_flight"] for one in status["workers"]["fake-a"]["lanes"].values())
    waiting: int = status["gateway"]["requests_in_flight"] - running
    return waiting


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_f48_who_waits_keeps_its_pool_and_who_comes_later_has_the_new_one(
    gateway: RunningGateway, worker: ScriptedWorker, admin: PolicyAdmin
) -> None:
    join(gateway, worker, slots=1)
    admin.put(single_pool_policy("before"))
    worker.scripts_by_message["hold"] = Script(hang=True)
    with ThreadPoolExecutor(8) as executor:
        held = executor.submit(gateway.chat, **user("hold"))
        assert worker.request_received.wait(10)
        early = [executor.submit(gateway.chat) for _ in range(3)]
        wait_until(lambda: in_line(gateway) == 3)
        assert admin.put(single_pool_policy("after")).status_code == 200
        assert "before" not in gateway.status()["pools"]
        late = [executor.submit(gateway.chat) for _ in range(3)]
        wait_until(lambda: in_line(gateway) == 6)
        worker.resume.set()
        pools = [response.result().headers["x-paceline-pool"] for response in (held, *early, *late)]
    assert pools == ["before"] * 4 + ["after"] * 3
    assert gateway.status()["outcomes"] == {"completed": 7}


def test_f48_a_stream_goes_on_and_its_lane_is_free_again_after_it(
    gateway: RunningGateway, worker: ScriptedWorker, admin: PolicyAdmin
) -> None:
    join(gateway, worker, slots=1)
    worker.script = Script(tokens=("one", " two", " three"), hang_after=2)
    with gateway.stream() as response:
        pieces = response.iter_raw()
        received = next(pieces)
        assert admin.put(single_pool_policy("all", lanes=("text-mtp",))).status_code == 200
        worker.resume.set()
        received += b"".join(pieces)
    assert received.endswith(b"data: [DONE]\n\n")
    lanes = gateway.status()["workers"]["fake-a"]["lanes"]
    assert [lane["in_flight"] for lane in lanes.values()] == [0, 0]


def test_f48_who_is_tried_again_is_tried_by_the_policy_it_began_with(
    gateway: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    admin: PolicyAdmin,
) -> None:
    admin.put(single_pool_policy("before"))
    join(gateway, worker, slots=1)
    worker.script = Script(hang=True, status=503)
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(gateway.chat)
        assert worker.request_received.wait(10)
        gateway.send_heartbeat(second_worker)
        admin.put(single_pool_policy("after"))
        worker.resume.set()  # to say that it is full
        response = asked.result()
    assert response.status_code == 200
    told = [response.headers[f"x-paceline-{name}"] for name in ("pool", "worker", "attempts")]
    assert told == ["before", "fake-b", "2"]
    assert gateway.chat().headers["x-paceline-pool"] == "after"


def test_f48_pools_come_and_go_under_load_and_every_request_is_answered(
    gateway: RunningGateway,
    worker: ScriptedWorker,
    second_worker: ScriptedWorker,
    admin: PolicyAdmin,
) -> None:
    workers = (worker, second_worker)
    documents = [single_pool_policy(name, limit=1000) for name in ("a", "b", "c")]
    admin.put(documents[0])
    for one in workers:
        join(gateway, one, slots=2)
    stop = threading.Event()
    seen: Counter[str] = Counter()

    def ask(seed: int) -> None:
        rng = Random(seed)
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            while not stop.is_set():
                body = chat_body(stream=rng.random() < 0.5)
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                seen[response.headers["x-paceline-pool"]] += 1

    def beat() -> None:
        while not stop.wait(1.0):
            for one in workers:
                join(gateway, one, slots=2)

    with ThreadPoolExecutor(17) as executor:
        asking = [executor.submit(beat), *(executor.submit(ask, seed) for seed in range(16))]
        try:
            for number, written in zip(range(30), itertools.cycle(documents), strict=False):
                assert admin.put(written).status_code == 200
                assert admin.post("/diff", documents[number % 2])["decisions"] >= 0
        finally:
            stop.set()
        for asked in asking:
            asked.result()
    assert set(seen) == {"a", "b", "c"}
    status = gateway.status()
    assert status["outcomes"] == {"completed": sum(seen.values())}
    assert status["policy"]["version"] == 32
    for told in status["workers"].values():
        assert [lane["in_flight"] for lane in told["lanes"].values()] == [0, 0]


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_policies_come_every_slot_comes_back_and_nobody_waits_for_nothing(
    seed: int,
) -> None:
    rng = Random(seed)
    policies = [
        read_policy(single_pool_policy(name, limit=20, timeout_s=5.0), "test")
        for name in ("a", "b", "c")
    ]
    door = SchedulerHarness(policies[0])
    door.fleet.heartbeat(worker_report(slots=2))

    async def one() -> str:
        case = RoutingRequest(rng.choice(policies), SAMPLED)
        lease = await door.dispatch.acquire(case, door.caller(rng.choice("xyz")))
        try:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            return lease.candidate.pool
        finally:
            door.dispatch.release(lease, AttemptResult.SUCCEEDED)

    ends = await asyncio.gather(*(one() for _ in range(200)), return_exceptions=True)
    assert {type(end) for end in ends} <= {str, QueueFull}
    assert door.slots_in_use() == 0
    assert [door.dispatch.waiting(name) for name in ("a", "b", "c")] == [0, 0, 0]


async def test_the_bounds_of_a_line_are_those_of_each_ones_own_policy() -> None:
    door = SchedulerHarness(read_policy(single_pool_policy("a", limit=3, timeout_s=30.0), "test"))
    door.fleet.heartbeat(worker_report())
    held = await door.acquire()
    patient = [door.acquire() for _ in range(2)]
    await run_ready_tasks()
    door.policy = read_policy(single_pool_policy("a", limit=2, timeout_s=30.0), "test")
    with pytest.raises(QueueFull):
        await door.acquire()
    door.policy = read_policy(single_pool_policy("a", limit=9, timeout_s=0.01), "test")
    with pytest.raises(QueueTimeout):
        await door.acquire()
    assert not any(one.done() for one in patient)
    door.dispatch.release(held, AttemptResult.SUCCEEDED)
    lease = await patient[0]
    await cancel_all(patient[1:])
    door.dispatch.release(lease, AttemptResult.SUCCEEDED)
    assert door.slots_in_use() == 0


async def test_a_route_of_the_same_name_in_another_policy_holds_nobody_up() -> None:
    door = SchedulerHarness(read_policy(single_pool_policy("a"), "test"))
    door.fleet.heartbeat(worker_report())
    held = await door.acquire()
    blocked = door.acquire()
    await run_ready_tasks()
    door.policy = read_policy(single_pool_policy("a", lanes=("text-mtp", "vlm")), "test")
    free = door.acquire(SAMPLED._replace(sampling=SAMPLED.sampling._replace(temperature=0)))
    assert (await free).candidate.lane == "text-mtp"
    assert not blocked.done()
    door.dispatch.release(held, AttemptResult.SUCCEEDED)
    assert (await blocked).candidate.lane == "vlm"
