"""Limits at the socket: who gets 429, what is told of them, and what costs nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.support.running_gateway import (
    RunningGateway,
    bearing,
    chat_body,
    error_of,
    eventually,
    settings_for_tests,
)
from tests.support.scripted_worker import DONE, USAGE, FakeWorker, Script, lane_report

USED_TOKENS = sum(cast("int", USAGE[name]) for name in ("prompt_tokens", "completion_tokens"))


def test_a_limit_answers_in_openais_shape_and_says_when_to_come_back(line: RunningGateway) -> None:
    line.bear(line.make_key(requests_a_minute=2, tokens_a_minute=5000)["secret"])
    first = line.chat(max_tokens=100)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-limit-tokens"] == "5000"
    assert 4894 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 4896
    assert line.chat(max_tokens=100).status_code == 200
    refused = line.chat(max_tokens=100)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "requests_a_minute_exceeded")
    assert error["message"] == "The limit of this key is reached: 2 requests a minute."
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_stream_and_an_error_tell_of_limits_too(line: RunningGateway, worker: FakeWorker) -> None:
    line.bear(line.make_key(requests_a_minute=9)["secret"])
    with line.stream() as answer:
        assert answer.headers["x-ratelimit-remaining-requests"] == "8"
        assert answer.read().endswith(DONE)
    assert line.chat(temperature=9).headers["x-ratelimit-remaining-requests"] == "8"
    worker.script = Script(status=500)
    broken = line.chat()
    assert broken.status_code == 502
    assert broken.headers["x-ratelimit-remaining-requests"] == "7"


def test_without_limits_nothing_is_told_of_them(line: RunningGateway) -> None:
    line.bear(line.make_key()["secret"])
    assert not [name for name in line.chat().headers if name.startswith("x-ratelimit")]


def left_tokens(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_f52_tokens_are_reserved_before_and_settled_after_with_what_the_worker_told(
    line: RunningGateway,
) -> None:
    # A day, because a minute refills while the test runs.
    line.bear(line.make_key(tokens_a_day=2000)["secret"])
    reserved = -(-len("Say a word.") // 3) + 500
    first, second = line.chat(max_tokens=500), line.chat(max_tokens=500)
    assert left_tokens(first) == 2000 - reserved
    assert left_tokens(second) == 2000 - USED_TOKENS - reserved


@pytest.mark.parametrize(
    "refused",
    [
        {"temperature": 9},
        {"model": "nobody-has-this"},
        {"max_tokens": 10_000},
        {"nonsense": True},
    ],
)
def test_a_refused_request_costs_nothing(line: RunningGateway, refused: dict[str, Any]) -> None:
    line.bear(line.make_key(tokens_a_day=2000, requests_a_minute=50)["secret"])
    answer = line.chat(**refused)
    assert answer.status_code in {400, 404}
    assert left_tokens(answer) == 2000
    assert answer.headers["x-ratelimit-remaining-requests"] == "50"


def test_a_request_that_found_no_worker_costs_nothing(gateway: RunningGateway) -> None:
    gateway.bear(gateway.make_key(tokens_a_day=2000, requests_a_minute=50)["secret"])
    for _ in range(2):
        answer = gateway.chat(max_tokens=10)
        assert error_of(answer) == (503, "no_worker")
        assert left_tokens(answer) == 2000
        assert answer.headers["x-ratelimit-remaining-requests"] == "50"


def test_a_request_that_a_worker_broke_is_not_paid_by_guess(
    line: RunningGateway, worker: FakeWorker
) -> None:
    line.bear(line.make_key(tokens_a_day=2000)["secret"])
    worker.script = Script(cut_after=2)
    with line.stream(max_tokens=100) as answer:
        assert b"worker_lost" in answer.read()
    worker.script = Script(status=500)
    assert left_tokens(line.chat(max_tokens=100)) == 2000


def test_who_leaves_early_pays_the_reservation(line: RunningGateway, worker: FakeWorker) -> None:
    line.bear(line.make_key(tokens_a_day=2000)["secret"])
    worker.script = Script(hang_after=2)
    with line.stream(max_tokens=100) as answer:
        next(answer.iter_raw())
    assert worker.client_left.wait(10)
    worker.script = Script()
    reserved = 4 + 100
    eventually(lambda: line.status()["gateway"]["requests_in_flight"] == 0)
    assert left_tokens(line.chat(max_tokens=100)) == 2000 - 2 * reserved


def test_who_leaves_before_any_worker_began_pays_nothing(
    gateway: RunningGateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    first, second = gateway.make_key(), gateway.make_key(tokens_a_day=2000)
    second_worker.script = Script(hang=True)
    gateway.join(second_worker, lanes=(lane_report("vlm", slots=1),))
    with ThreadPoolExecutor(1) as aside:
        gateway.bear(first["secret"])
        running = aside.submit(gateway.chat)
        eventually(lambda: second_worker.answering == 1)
        worker.script = Script(status=503)
        gateway.join(worker)
        gateway.bear(second["secret"])
        # Asked of one that has no time, then in line for one that is full.
        with pytest.raises(httpx.ReadTimeout):
            gateway.client.post("/v1/chat/completions", json=chat_body(), timeout=1.0)
        assert len(worker.heard) == 1
        eventually(lambda: gateway.status()["gateway"]["requests_in_flight"] == 1)
        assert left_tokens(gateway.chat(temperature=9)) == 2000
        second_worker.go_on.set()
        assert running.result().status_code == 200


def test_requests_at_a_time_are_counted_to_the_last_byte(
    line: RunningGateway, worker: FakeWorker
) -> None:
    line.bear(line.make_key(concurrent_requests=2)["secret"])
    worker.script = Script(hang_after=2)
    with line.stream() as first, line.stream() as second:
        pieces = first.iter_raw(), second.iter_raw()  # kept: a dropped iterator leaves
        assert all(next(of_one) for of_one in pieces)
        refused = line.chat()
        assert error_of(refused) == (429, "concurrent_requests_exceeded")
        assert refused.headers["retry-after"] == "1"
    eventually(lambda: worker.answering == 0)
    worker.script = Script()
    eventually(lambda: line.chat().status_code == 200)


def test_many_at_once_never_get_more_than_the_limit(
    line: RunningGateway, worker: FakeWorker
) -> None:
    key = line.make_key(requests_a_minute=7)
    url = f"{line.url}/v1/chat/completions"
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda _: httpx.post(url, json=chat_body(), headers=bearing(key)).status_code,
                range(32),
            )
        )
    assert answers.count(200) == len(worker.heard)
    assert 7 <= answers.count(200) <= 8, "one more where the test took eight seconds"
    assert set(answers) == {200, 429}


def test_a_budget_for_a_day_survives_a_restart(tmp_path: Path, worker: FakeWorker) -> None:
    with RunningGateway(settings_for_tests(tmp_path)) as first:
        first.join(worker)
        secret = first.make_key(tokens_a_day=2000)["secret"]
        first.bear(secret)
        assert first.chat(max_tokens=10).status_code == 200
    with RunningGateway(settings_for_tests(tmp_path)) as second:
        second.join(worker)
        second.bear(secret)
        assert left_tokens(second.chat(max_tokens=10)) == 2000 - USED_TOKENS - 14
