"""Limits at the socket: who gets 429, what is told of them, and what costs nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, USAGE, Script, ScriptedWorker, lane_report

USED_TOKENS = sum(cast("int", USAGE[name]) for name in ("prompt_tokens", "completion_tokens"))


def test_a_limit_answers_in_openais_shape_and_says_when_to_come_back(
    gateway_with_worker: RunningGateway,
) -> None:
    gateway_with_worker.use_key(
        gateway_with_worker.create_key(requests_a_minute=2, tokens_a_minute=5000)["secret"]
    )
    first = gateway_with_worker.chat(max_tokens=100)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-limit-tokens"] == "5000"
    assert 4894 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 4896
    assert gateway_with_worker.chat(max_tokens=100).status_code == 200
    refused = gateway_with_worker.chat(max_tokens=100)
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "requests_a_minute_exceeded")
    assert error["message"] == "The rate limit of this API key is reached: 2 requests a minute."
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_a_stream_and_an_error_tell_of_limits_too(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(requests_a_minute=9)["secret"])
    with gateway_with_worker.stream() as response:
        assert response.headers["x-ratelimit-remaining-requests"] == "8"
        assert response.read().endswith(DONE)
    assert gateway_with_worker.chat(temperature=9).headers["x-ratelimit-remaining-requests"] == "8"
    worker.script = Script(status=500)
    broken = gateway_with_worker.chat()
    assert broken.status_code == 502
    assert broken.headers["x-ratelimit-remaining-requests"] == "7"


def test_without_limits_nothing_is_told_of_them(gateway_with_worker: RunningGateway) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key()["secret"])
    assert not [
        name for name in gateway_with_worker.chat().headers if name.startswith("x-ratelimit")
    ]


def left_tokens(response: httpx.Response) -> int:
    return int(response.headers["x-ratelimit-remaining-tokens"])


def test_f52_tokens_are_reserved_before_and_settled_after_with_what_the_worker_told(
    gateway_with_worker: RunningGateway,
) -> None:
    # A day, because a minute refills while the test runs.
    gateway_with_worker.use_key(gateway_with_worker.create_key(tokens_a_day=2000)["secret"])
    reserved = -(-len("Say a word.") // 3) + 500
    first, second = (
        gateway_with_worker.chat(max_tokens=500),
        gateway_with_worker.chat(max_tokens=500),
    )
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
def test_a_refused_request_costs_nothing(
    gateway_with_worker: RunningGateway, refused: dict[str, Any]
) -> None:
    gateway_with_worker.use_key(
        gateway_with_worker.create_key(tokens_a_day=2000, requests_a_minute=50)["secret"]
    )
    response = gateway_with_worker.chat(**refused)
    assert response.status_code in {400, 404}
    assert left_tokens(response) == 2000
    assert response.headers["x-ratelimit-remaining-requests"] == "50"


def test_a_request_that_found_no_worker_costs_nothing(gateway: RunningGateway) -> None:
    gateway.use_key(gateway.create_key(tokens_a_day=2000, requests_a_minute=50)["secret"])
    for _ in range(2):
        response = gateway.chat(max_tokens=10)
        assert status_and_code(response) == (503, "no_worker")
        assert left_tokens(response) == 2000
        assert response.headers["x-ratelimit-remaining-requests"] == "50"


def test_a_request_that_a_worker_broke_is_not_paid_by_guess(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(tokens_a_day=2000)["secret"])
    worker.script = Script(cut_after=2)
    with gateway_with_worker.stream(max_tokens=100) as response:
        assert b"worker_lost" in response.read()
    worker.script = Script(status=500)
    assert left_tokens(gateway_with_worker.chat(max_tokens=100)) == 2000


def test_who_leaves_early_pays_the_reservation(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(tokens_a_day=2000)["secret"])
    worker.script = Script(hang_after=2)
    with gateway_with_worker.stream(max_tokens=100) as response:
        next(response.iter_raw())
    assert worker.client_disconnected.wait(10)
    worker.script = Script()
    reserved = 4 + 100
    wait_until(lambda: gateway_with_worker.status()["gateway"]["requests_in_flight"] == 0)
    assert left_tokens(gateway_with_worker.chat(max_tokens=100)) == 2000 - 2 * reserved


def test_who_leaves_before_any_worker_began_pays_nothing(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    first, second = gateway.create_key(), gateway.create_key(tokens_a_day=2000)
    second_worker.script = Script(hang=True)
    gateway.send_heartbeat(second_worker, lanes=(lane_report("vlm", slots=1),))
    with ThreadPoolExecutor(1) as executor:
        gateway.use_key(first["secret"])
        running = executor.submit(gateway.chat)
        wait_until(lambda: second_worker.in_flight == 1)
        worker.script = Script(status=503)
        gateway.send_heartbeat(worker)
        gateway.use_key(second["secret"])
        # Asked of one that has no time, then in line for one that is full.
        with pytest.raises(httpx.ReadTimeout):
            gateway.client.post("/v1/chat/completions", json=chat_body(), timeout=1.0)
        assert len(worker.requests) == 1
        wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 1)
        assert left_tokens(gateway.chat(temperature=9)) == 2000
        second_worker.resume.set()
        assert running.result().status_code == 200


def test_requests_at_a_time_are_counted_to_the_last_byte(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(concurrent_requests=2)["secret"])
    worker.script = Script(hang_after=2)
    with gateway_with_worker.stream() as first, gateway_with_worker.stream() as second:
        pieces = first.iter_raw(), second.iter_raw()  # kept: a dropped iterator leaves
        assert all(next(of_one) for of_one in pieces)
        refused = gateway_with_worker.chat()
        assert status_and_code(refused) == (429, "concurrent_requests_exceeded")
        assert refused.headers["retry-after"] == "1"
    wait_until(lambda: worker.in_flight == 0)
    worker.script = Script()
    wait_until(lambda: gateway_with_worker.chat().status_code == 200)


def test_many_at_once_never_get_more_than_the_limit(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    key = gateway_with_worker.create_key(requests_a_minute=7)
    url = f"{gateway_with_worker.url}/v1/chat/completions"
    with ThreadPoolExecutor(16) as pool:
        responses = list(
            pool.map(
                lambda _: (
                    httpx.post(url, json=chat_body(), headers=bearer_headers(key)).status_code
                ),
                range(32),
            )
        )
    assert responses.count(200) == len(worker.requests)
    assert 7 <= responses.count(200) <= 8, "one more where the test took eight seconds"
    assert set(responses) == {200, 429}


def test_a_budget_for_a_day_survives_a_restart(tmp_path: Path, worker: ScriptedWorker) -> None:
    with RunningGateway(make_settings(tmp_path)) as first:
        first.send_heartbeat(worker)
        secret = first.create_key(tokens_a_day=2000)["secret"]
        first.use_key(secret)
        assert first.chat(max_tokens=10).status_code == 200
    with RunningGateway(make_settings(tmp_path)) as second:
        second.send_heartbeat(worker)
        second.use_key(secret)
        assert left_tokens(second.chat(max_tokens=10)) == 2000 - USED_TOKENS - 14
