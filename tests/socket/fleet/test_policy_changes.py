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
from gateway.fleet.circuit_breaker import Verdict
from gateway.routing.select import RoutingRequest
from policies.document import read_policy
from tests.support.policies import Admin, document
from tests.support.request_profiles import SAMPLED
from tests.support.running_gateway import RunningGateway, chat_body, eventually
from tests.support.scheduler_harness import Door, cancelled, report, settled
from tests.support.scripted_worker import FakeWorker, Script, lane_report


def join(gateway: RunningGateway, worker: FakeWorker, *, slots: int) -> None:
    lanes = [lane_report(name, slots=slots).model_dump() for name in ("text-mtp", "vlm")]
    worker.reported = worker.report(lanes=lanes)
    assert gateway.join(worker, lanes=lanes).status_code == 200


def in_line(gateway: RunningGateway) -> int:
    """Count all who wait, whatever pools there are now."""
    status = gateway.status()
    running = sum(one["in_flight"] for one in status["workers"]["fake-a"]["lanes"].values())
    waiting: int = status["gateway"]["requests_in_flight"] - running
    return waiting


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def test_f48_who_waits_keeps_its_pool_and_who_comes_later_has_the_new_one(
    gateway: RunningGateway, worker: FakeWorker, admin: Admin
) -> None:
    join(gateway, worker, slots=1)
    admin.put(document("before"))
    worker.plans["hold"] = Script(hang=True)
    with ThreadPoolExecutor(8) as aside:
        held = aside.submit(gateway.chat, **user("hold"))
        assert worker.hearing.wait(10)
        early = [aside.submit(gateway.chat) for _ in range(3)]
        eventually(lambda: in_line(gateway) == 3)
        assert admin.put(document("after")).status_code == 200
        assert "before" not in gateway.status()["pools"]
        late = [aside.submit(gateway.chat) for _ in range(3)]
        eventually(lambda: in_line(gateway) == 6)
        worker.go_on.set()
        pools = [answer.result().headers["x-paceline-pool"] for answer in (held, *early, *late)]
    assert pools == ["before"] * 4 + ["after"] * 3
    assert gateway.status()["outcomes"] == {"completed": 7}


def test_f48_a_stream_goes_on_and_its_lane_is_free_again_after_it(
    gateway: RunningGateway, worker: FakeWorker, admin: Admin
) -> None:
    join(gateway, worker, slots=1)
    worker.script = Script(words=("one", " two", " three"), hang_after=2)
    with gateway.stream() as answer:
        pieces = answer.iter_raw()
        received = next(pieces)
        assert admin.put(document("all", lanes=("text-mtp",))).status_code == 200
        worker.go_on.set()
        received += b"".join(pieces)
    assert received.endswith(b"data: [DONE]\n\n")
    lanes = gateway.status()["workers"]["fake-a"]["lanes"]
    assert [lane["in_flight"] for lane in lanes.values()] == [0, 0]


def test_f48_who_is_tried_again_is_tried_by_the_policy_it_began_with(
    gateway: RunningGateway, worker: FakeWorker, second_worker: FakeWorker, admin: Admin
) -> None:
    admin.put(document("before"))
    join(gateway, worker, slots=1)
    worker.script = Script(hang=True, status=503)
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(gateway.chat)
        assert worker.hearing.wait(10)
        gateway.join(second_worker)
        admin.put(document("after"))
        worker.go_on.set()  # to say that it is full
        answer = asked.result()
    assert answer.status_code == 200
    told = [answer.headers[f"x-paceline-{name}"] for name in ("pool", "worker", "attempts")]
    assert told == ["before", "fake-b", "2"]
    assert gateway.chat().headers["x-paceline-pool"] == "after"


def test_f48_pools_come_and_go_under_load_and_every_request_is_answered(
    gateway: RunningGateway, worker: FakeWorker, second_worker: FakeWorker, admin: Admin
) -> None:
    workers = (worker, second_worker)
    documents = [document(name, limit=1000) for name in ("a", "b", "c")]
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
                answer = client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                seen[answer.headers["x-paceline-pool"]] += 1

    def beat() -> None:
        while not stop.wait(1.0):
            for one in workers:
                join(gateway, one, slots=2)

    with ThreadPoolExecutor(17) as aside:
        asking = [aside.submit(beat), *(aside.submit(ask, seed) for seed in range(16))]
        try:
            for number, written in zip(range(30), itertools.cycle(documents), strict=False):
                assert admin.put(written).status_code == 200
                assert admin.ask("/diff", documents[number % 2])["decisions"] >= 0
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
        read_policy(document(name, limit=20, timeout_s=5.0), "test") for name in ("a", "b", "c")
    ]
    door = Door(policies[0])
    door.fleet.beat(report(slots=2))

    async def one() -> str:
        case = RoutingRequest(rng.choice(policies), SAMPLED)
        decision = door.dispatch.decide(case, frozenset())
        lease = await door.dispatch.lease(case, decision, door.caller(rng.choice("xyz")))
        try:
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            return lease.candidate.pool
        finally:
            door.dispatch.give_back(lease, Verdict.ANSWERED)

    ends = await asyncio.gather(*(one() for _ in range(200)), return_exceptions=True)
    assert {type(end) for end in ends} <= {str, QueueFull}
    assert door.busy() == 0
    assert [door.dispatch.waiting(name) for name in ("a", "b", "c")] == [0, 0, 0]


async def test_the_bounds_of_a_line_are_those_of_each_ones_own_policy() -> None:
    door = Door(read_policy(document("a", limit=3, timeout_s=30.0), "test"))
    door.fleet.beat(report())
    held = await door.ask()
    patient = [door.ask() for _ in range(2)]
    await settled()
    door.policy = read_policy(document("a", limit=2, timeout_s=30.0), "test")
    with pytest.raises(QueueFull):
        await door.ask()
    door.policy = read_policy(document("a", limit=9, timeout_s=0.01), "test")
    with pytest.raises(QueueTimeout):
        await door.ask()
    assert not any(one.done() for one in patient)
    door.dispatch.give_back(held, Verdict.ANSWERED)
    lease = await patient[0]
    await cancelled(patient[1:])
    door.dispatch.give_back(lease, Verdict.ANSWERED)
    assert door.busy() == 0


async def test_a_route_of_the_same_name_in_another_policy_holds_nobody_up() -> None:
    door = Door(read_policy(document("a"), "test"))
    door.fleet.beat(report())
    held = await door.ask()
    blocked = door.ask()
    await settled()
    door.policy = read_policy(document("a", lanes=("text-mtp", "vlm")), "test")
    free = door.ask(SAMPLED._replace(sampling=SAMPLED.sampling._replace(temperature=0)))
    assert (await free).candidate.lane == "text-mtp"
    assert not blocked.done()
    door.dispatch.give_back(held, Verdict.ANSWERED)
    assert (await blocked).candidate.lane == "vlm"
