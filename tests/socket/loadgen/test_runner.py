"""Send times of requests, to a worker behind a real socket."""

import asyncio
import functools
from contextlib import AbstractAsyncContextManager
from random import Random

import pytest

from gateway.loadgen.client import Endpoint, open_endpoint, read_answer
from gateway.loadgen.prompts import Prompt
from gateway.loadgen.runner import Level, arrivals_s, send_all
from gateway.loadgen.stats import peak_concurrency
from tests.support.scripted_worker import Script, ScriptedWorker

PROMPTS = [Prompt(({"role": "user", "content": str(number)},)) for number in range(12)]


def open_worker(worker: ScriptedWorker) -> AbstractAsyncContextManager[Endpoint]:
    return open_endpoint(worker.url, model="demo", fields={})


async def test_the_concurrency_level_is_reached_and_never_exceeded(worker: ScriptedWorker) -> None:
    worker.script = Script(pause_s=0.002)
    async with open_worker(worker) as endpoint:
        send = functools.partial(send_all, random=Random(0), on_end=lambda _: None)
        responses = await send(endpoint, PROMPTS, Level(concurrency=3))
    assert [response.status for response in responses] == [200] * 12
    assert peak_concurrency([read_answer(response) for response in responses]) == 3
    prompts = [response.body["messages"][0]["content"] for response in worker.requests]
    assert sorted(prompts) == sorted(str(number) for number in range(12))


async def test_requests_at_a_rate_are_sent_when_due_without_waiting_for_responses(worker) -> None:
    worker.script = Script(hang=True)  # no response completes, so no request waits for one
    async with open_worker(worker) as endpoint:
        level = Level(rate=200)
        sending = asyncio.create_task(
            send_all(endpoint, PROMPTS, level, random=Random(5), on_end=lambda _: None)
        )
        async with asyncio.timeout(60):
            while len(worker.requests) < len(PROMPTS):
                await asyncio.sleep(0.01)
        assert worker.in_flight == len(PROMPTS)
        worker.resume.set()
        responses = await sending
    expected = arrivals_s(200, len(PROMPTS), Random(5))
    due = [response.due_s - responses[0].due_s for response in responses]
    assert due == pytest.approx([moment - expected[0] for moment in expected])
    assert [response.status for response in responses] == [200] * 12


def test_arrivals_have_the_rate_and_are_reproducible_by_seed() -> None:
    moments = arrivals_s(4.0, 100, Random(3))
    assert moments == sorted(moments)
    assert moments[-1] == pytest.approx(25.0)
    assert moments == arrivals_s(4.0, 100, Random(3))
    assert moments != arrivals_s(4.0, 100, Random(4))


@pytest.mark.parametrize(
    ("script", "status", "received"),
    [(Script(cut_after=2), 200, b'"one"'), (Script(drop=True), 0, b"")],
)
async def test_a_lost_connection_is_recorded_as_a_problem_with_the_chunks_before_it(
    worker: ScriptedWorker, script: Script, status: int, received: bytes
) -> None:
    worker.script = script
    async with open_worker(worker) as endpoint:
        response = await endpoint.send(PROMPTS[0])
    assert response.status == status
    assert response.problem.startswith("the connection failed")
    assert received in b"".join(part for _, part in response.arrivals)
