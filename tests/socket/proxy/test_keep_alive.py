"""Streams that are silent for long: an early head, comments in place of events, late headers."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway_fixtures import MakeGateway
from tests.support.raw_client import stream_error_code, wait_for_outcomes
from tests.support.running_gateway import RunningGateway, chat_body, status_and_code, wait_until
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, lane_report, stream_events

KEEPALIVE_S = 0.3
CHECK_S = 0.1


@pytest.fixture
def gateway(make_gateway: MakeGateway) -> RunningGateway:
    """Run a gateway that keeps silent streams alive soon."""
    return make_gateway(check_s=CHECK_S, keepalive_s=KEEPALIVE_S)


Opened = tuple[httpx.Response, Callable[[bytes], bytes]]


@contextmanager
def opened(gateway: RunningGateway) -> Iterator[Opened]:
    """Yield a stream whose head has come, and a function that reads up to some bytes or the end."""
    with gateway.stream() as response:
        parts = response.iter_raw()
        received = b""

        def read_until(end: bytes) -> bytes:
            nonlocal received
            while end not in received and (part := next(parts, b"")):
                received += part
            return received

        yield response, read_until


@contextmanager
def queued(gateway: RunningGateway, *busy: ScriptedWorker) -> Iterator[Opened]:
    """Yield a stream that waits in the queue behind one that each of the workers holds."""
    with occupied(gateway, *busy), opened(gateway) as stream:
        yield stream


@contextmanager
def occupied(gateway: RunningGateway, *busy: ScriptedWorker) -> Iterator[None]:
    """Hold the only slot of each worker; later requests get a whole answer."""
    for worker in busy:
        worker.status_report = worker.report(lanes=[lane_report("vlm", slots=1)])
        gateway.join(worker, lanes=worker.status_report.lanes)
        worker.script = Script(hang_after=1)
        worker.resume.clear()
    with ExitStack() as streams:
        for _ in busy:
            streams.enter_context(opened(gateway))
        wait_until(lambda: all(worker.in_flight for worker in busy))
        for worker in busy:
            worker.script = Script()
        yield


def chunks(received: bytes) -> list[dict[str, Any]]:
    lines = received.split(b"\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def test_the_head_and_comments_go_out_while_the_worker_reads_the_prompt(gateway, worker) -> None:
    gateway.join(worker)
    worker.script.hang_after = 0
    with opened(gateway) as (response, read_until):
        assert response.status_code == 200
        assert response.headers["x-paceline-worker"] == "fake-a"
        silent = read_until(b": keepalive\n\n: keepalive\n\n")
        worker.resume.set()
        received = read_until(DONE)
    assert silent.replace(b": keepalive\n\n", b"") == b""
    events = stream_events(worker.script.tokens)
    assert received.replace(b": keepalive\n\n", b"") == b"".join((*events[:-2], DONE))
    assert b'"headers"' not in received, "the head had them all"
    wait_for_outcomes(gateway, completed=1)


def test_a_pause_within_an_answer_gets_comments_and_the_first_token_is_none_of_them(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway.join(worker)
    worker.script.hang_after = 1
    began_s = time.monotonic()
    with opened(gateway) as (_, read_until):
        read_until(b": keepalive\n\n: keepalive\n\n")
        worker.resume.set()
        assert read_until(DONE).count(b": keepalive") >= 2
    waited_s = time.monotonic() - began_s
    wait_for_outcomes(gateway, completed=1)
    metrics = gateway.client.get("/metrics").text
    (sum_s,) = re.findall(r"\npaceline_time_to_first_token_seconds_sum\S* (\S+)", metrics)
    assert 2 * KEEPALIVE_S <= float(sum_s) <= waited_s


def test_a_queued_stream_gets_an_early_head_and_later_the_headers_that_it_lacks(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    with queued(gateway, worker) as (response, read_until):
        assert response.status_code == 200
        assert response.headers["x-request-id"]
        assert "x-paceline-worker" not in response.headers
        assert re.match(rb": queued 1, about \d+ s\n\n", read_until(b"\n\n"))
        worker.resume.set()
        received = read_until(DONE)
    assert b": x-paceline-worker: fake-a\n" in received
    *others, last = chunks(received)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["headers"]["x-paceline-worker"] == "fake-a"
    assert last["headers"]["x-paceline-attempts"] == "1"
    assert not any("headers" in chunk for chunk in others)


def test_an_error_after_an_early_head_is_the_last_event(gateway, worker, admin) -> None:
    admin.use(pools={"vlm": {"lanes": "vlm", "queue": {"timeout_s": 0.6}}})
    with queued(gateway, worker) as (response, read_until):
        assert response.status_code == 200
        received = read_until(b"[DONE]")
        worker.resume.set()
    assert stream_error_code(received) == "queue_timeout"
    assert b"\n: retry-after: " in received
    assert b"[DONE]" not in received


def test_what_a_worker_would_refuse_is_refused_before_an_early_head(make_gateway, worker) -> None:
    """A worker checks what waits for long; the refusal has its own status, and no slot is used."""
    gateway = make_gateway(check_s=CHECK_S, keepalive_s=4.0)  # the check comes two seconds before
    error = {"message": "Too long.", "param": "messages", "code": "context_length_exceeded"}
    worker.check_answer = (400, json.dumps({"error": error}).encode())
    with occupied(gateway, worker):
        assert status_and_code(gateway.chat(stream=True)) == (400, "context_length_exceeded")
        assert [body["stream"] for body in worker.checks] == [True]
        assert len(worker.requests) == 1
        worker.resume.set()


def test_a_check_that_refuses_nothing_leaves_a_stream_in_its_queue(gateway, worker) -> None:
    not_found = (404, b'{"error": {"message": ""}}')
    answers = ((200, b'{"prompt_tokens": 7}'), (500, b"{}"), not_found, (503, b"{}"))
    for count, answer in enumerate(answers, 1):
        worker.check_answer = answer
        with queued(gateway, worker) as (response, read_until):
            wait_until(lambda count=count: len(worker.checks) == count)  # type: ignore[misc]
            read_until(b": queued")
            worker.resume.set()
            assert read_until(DONE).endswith(DONE)
        assert response.status_code == 200
        assert len(worker.checks) == count


def test_after_an_early_head_another_worker_is_asked(gateway, worker, second_worker) -> None:
    with queued(gateway, worker, second_worker) as (_, read_until):
        worker.script = Script(status=503, headers=((b"retry-after", b"60"),))
        worker.resume.set()
        wait_until(lambda: len(worker.requests) == 2)
        second_worker.resume.set()
        received = read_until(DONE)
    assert chunks(received)[-1]["headers"]["x-paceline-worker"] == "fake-b"
    assert chunks(received)[-1]["headers"]["x-paceline-attempts"] == "2"


def test_a_crash_after_comments_alone_counts_for_the_quarantine(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    for member in (worker, second_worker):
        member.script = Script(events=(b": read 1 of 2\n\n",), cut_after=1)
        gateway.join(member)
    codes: list[tuple[int, str]] = []
    while codes[-1:] != [(422, "request_quarantined")]:
        response = gateway.chat(stream=True)
        if response.status_code == 200:
            assert stream_error_code(response.content) == "worker_lost"
        else:
            codes.append(status_and_code(response))
        assert len(worker.requests) + len(second_worker.requests) < 30


def test_a_whole_answer_is_not_begun_early(make_gateway, worker) -> None:
    worker.script.hang = True
    gateway = make_gateway(worker, check_s=CHECK_S, keepalive_s=0.1, answer_timeout_s=0.6)
    assert status_and_code(gateway.chat()) == (504, "worker_timeout")


def test_the_openai_client_reads_comments_late_headers_and_late_errors(gateway, worker) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    asked: Any = {**chat_body(), "stream": True}
    with occupied(gateway, worker):
        stream = client.chat.completions.create(**asked)
        worker.resume.set()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == "one two three"
    worker.script = Script(hang_after=0, cut_after=1)
    worker.resume.clear()
    stream = client.chat.completions.create(**asked)
    worker.resume.set()
    with pytest.raises(openai.APIError) as raised:
        list(stream)
    assert raised.value.code == "worker_lost"
