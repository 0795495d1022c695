"""When requests are sent, to a worker behind a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest

from gateway.loadgen.client import Endpoint, open_endpoint, read_answer
from gateway.loadgen.prompts import Prompt
from gateway.loadgen.runner import Level, arrivals_s, send_all
from gateway.loadgen.stats import peak_concurrency
from tests.support.running_gateway import running_server
from tests.support.scripted_worker import Script, ScriptedWorker

PROMPTS = [Prompt(({"role": "user", "content": str(number)},)) for number in range(12)]


@pytest.fixture
def worker() -> Iterator[ScriptedWorker]:
    fake = ScriptedWorker()
    with running_server(fake, sockets=[fake.socket]):
        yield fake


def opened(worker: ScriptedWorker) -> AbstractAsyncContextManager[Endpoint]:
    return open_endpoint(worker.url, model="demo", fields={})


async def test_so_many_at_a_time_are_never_more_and_no_fewer(worker: ScriptedWorker) -> None:
    worker.script = Script(pause_s=0.002)
    async with opened(worker) as endpoint:
        level = Level(concurrency=3)
        heard = await send_all(endpoint, PROMPTS, level, random=Random(0), on_end=lambda _: None)
    assert [each.status for each in heard] == [200] * 12
    assert peak_concurrency([read_answer(each) for each in heard]) == 3
    asked = [each.body["messages"][0]["content"] for each in worker.requests]
    assert sorted(asked) == sorted(str(number) for number in range(12))


async def test_who_arrives_waits_for_nobody_and_counts_from_when_it_was_due(
    worker: ScriptedWorker,
) -> None:
    worker.script = Script(hang=True)  # until `go_on`: no answer can make room for a request
    async with opened(worker) as endpoint:
        level = Level(rate=200)
        sending = asyncio.create_task(
            send_all(endpoint, PROMPTS, level, random=Random(5), on_end=lambda _: None)
        )
        async with asyncio.timeout(60):
            while len(worker.requests) < len(PROMPTS):
                await asyncio.sleep(0.01)
        assert worker.in_flight == len(PROMPTS)
        worker.resume.set()
        heard = await sending
    expected = arrivals_s(200, len(PROMPTS), Random(5))
    due = [each.due_s - heard[0].due_s for each in heard]
    assert due == pytest.approx([moment - expected[0] for moment in expected])
    assert [each.status for each in heard] == [200] * 12


def test_arrivals_come_at_just_the_rate_and_again_with_the_same_seed() -> None:
    moments = arrivals_s(4.0, 100, Random(3))
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(25.0)
    assert moments == arrivals_s(4.0, 100, Random(3))
    assert moments != arrivals_s(4.0, 100, Random(4))


async def test_what_came_before_a_connection_broke_is_kept(worker: ScriptedWorker) -> None:
    worker.script = Script(cut_after=2)
    async with opened(worker) as endpoint:
        heard = await endpoint.send(PROMPTS[0])
    assert heard.problem.startswith("the connection failed")
    assert b'"one"' in b"".join(part for _, part in heard.arrivals)


async def test_a_server_that_is_gone_is_a_problem_and_no_exception(worker: ScriptedWorker) -> None:
    worker.script = Script(drop=True)
    async with opened(worker) as endpoint:
        heard = await endpoint.send(PROMPTS[0])
    assert heard.status == 0
    assert heard.problem.startswith("the connection failed")
