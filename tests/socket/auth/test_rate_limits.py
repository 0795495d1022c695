"""Rate limits: 429 responses, rate-limit headers, reservation and settlement of tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.support.heartbeats import repeated
from tests.support.raw_client import leave_once
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    chat_body,
    make_settings,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import (
    DONE,
    USAGE,
    Script,
    ScriptedWorker,
    event,
    lane_report,
)
from workers.protocol import RUNNING_USAGE_TOKENS

PROMPT_TOKENS = 16 + -(-len("Say a word.") // 3)
"""Reserved for the prompt of `chat_body`."""
BUSY = Script(status=503, headers=((b"retry-after", b"60"),))
"""Without the header the gateway would ask again after a second, when these clients leave."""
USED_TOKENS = sum(cast("int", USAGE[name]) for name in ("prompt_tokens", "completion_tokens"))


def test_a_429_has_openais_error_format_and_retry_after(
    shared_gateway: RunningGateway,
) -> None:
    shared_gateway.use_key(
        shared_gateway.create_key(requests_a_minute=2, tokens_a_minute=5000)["secret"]
    )
    first = shared_gateway.chat(max_tokens=100)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-limit-tokens"] == "5000"
    assert 4878 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 4880
    assert shared_gateway.chat(max_tokens=100).status_code == 200
    rejected = shared_gateway.chat(max_tokens=100)
    assert rejected.status_code == 429
    error = rejected.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "requests_a_minute_exceeded")
    assert error["message"] == "The rate limit of this API key is reached: 2 requests a minute."
    assert 0 < int(rejected.headers["retry-after"]) <= 30
    assert rejected.headers["x-ratelimit-remaining-requests"] == "0"


def test_streams_and_errors_carry_rate_limit_headers(
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


def test_a_key_without_limits_gets_no_rate_limit_headers(
    shared_gateway: RunningGateway,
) -> None:
    shared_gateway.use_key(shared_gateway.create_key()["secret"])
    assert not [name for name in shared_gateway.chat().headers if name.startswith("x-ratelimit")]


def remaining_tokens(response: httpx.Response) -> int:
    return int(response.headers["x-ratelimit-remaining-tokens"])


def test_f52_tokens_are_reserved_before_and_settled_with_the_workers_usage(
    shared_gateway: RunningGateway,
) -> None:
    # A day, because a minute refills while the test runs.
    shared_gateway.use_key(shared_gateway.create_key(tokens_a_day=2000)["secret"])
    reserved = PROMPT_TOKENS + 500
    first, second = (
        shared_gateway.chat(max_tokens=500),
        shared_gateway.chat(max_tokens=500),
    )
    assert remaining_tokens(first) == 2000 - reserved
    assert remaining_tokens(second) == 2000 - USED_TOKENS - reserved


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 9},
        {"model": "unknown-model"},
        {"max_tokens": 10_000},
        {"nonsense": True},
    ],
)
def test_a_rejected_request_consumes_no_limit(
    shared_gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    shared_gateway.use_key(
        shared_gateway.create_key(tokens_a_day=2000, requests_a_minute=50)["secret"]
    )
    response = shared_gateway.chat(**fields)
    assert response.status_code in {400, 404}
    assert remaining_tokens(response) == 2000
    assert response.headers["x-ratelimit-remaining-requests"] == "50"


def test_a_request_without_a_worker_consumes_no_limit(gateway: RunningGateway) -> None:
    gateway.use_key(gateway.create_key(tokens_a_day=2000, requests_a_minute=50)["secret"])
    for _ in range(2):
        response = gateway.chat(max_tokens=10)
        assert status_and_code(response) == (503, "no_worker")
        assert remaining_tokens(response) == 2000
        assert response.headers["x-ratelimit-remaining-requests"] == "50"


def test_a_request_that_a_worker_failed_consumes_no_tokens(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(tokens_a_day=2000)["secret"])
    worker.script = Script(cut_after=2)
    with gateway_with_worker.stream(max_tokens=100) as response:
        assert b"worker_lost" in response.read()
    worker.script = Script(status=500)
    assert remaining_tokens(gateway_with_worker.chat(max_tokens=100)) == 2000


def test_a_client_that_disconnects_early_is_charged_the_reservation(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    shared_gateway.use_key(shared_gateway.create_key(tokens_a_day=2000)["secret"])
    module_worker.script = Script(hang_after=2)
    with shared_gateway.stream(max_tokens=100) as response:
        next(response.iter_raw())
    assert module_worker.client_disconnected.wait(10)
    module_worker.script = Script()
    reserved = PROMPT_TOKENS + 100
    wait_until(lambda: shared_gateway.status()["gateway"]["requests_in_flight"] == 0)
    assert remaining_tokens(shared_gateway.chat(max_tokens=100)) == 2000 - 2 * reserved


def test_c6_a_stream_that_is_left_costs_the_usage_that_the_worker_reported_so_far(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    """LiteLLM #38176, #23714, #11083: budgets that some paths do not enforce."""
    shared_gateway.use_key(shared_gateway.create_key(tokens_a_day=2000)["secret"])
    frame = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    usage = {"prompt_tokens": 950, "completion_tokens": 3}
    events = (event(frame | {"usage": usage}), event(frame), event(frame))
    module_worker.script = Script(events=events, hang_after=3)
    with shared_gateway.stream(max_tokens=8) as response:
        received = b""
        for piece in response.iter_raw():
            received += piece
            if received.count(b"content") == 3:
                break
    assert module_worker.client_disconnected.wait(10)
    assert b"usage" not in received
    module_worker.script = Script()
    reserved = PROMPT_TOKENS + 100
    wait_until(lambda: shared_gateway.status()["gateway"]["requests_in_flight"] == 0)
    charged = 950 + 3 + RUNNING_USAGE_TOKENS
    remaining = remaining_tokens(shared_gateway.chat(max_tokens=100))
    assert remaining == 2000 - charged - reserved


def test_c16_an_explanation_counts_as_a_request_without_tokens(
    shared_gateway: RunningGateway,
) -> None:
    key = shared_gateway.create_key(requests_a_minute=2, tokens_a_day=2000)
    shared_gateway.use_key(key["secret"])
    client = shared_gateway.client
    responses = [client.post("/v1/route/explain", json=chat_body()) for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert responses[-1].json()["error"]["code"] == "requests_a_minute_exceeded"
    assert remaining_tokens(shared_gateway.chat()) == 2000


def waits(gateway: RunningGateway) -> bool:
    """Return whether a request waits for a row."""
    return bool(gateway.status()["pools"]["vlm"]["waiting"])


def test_a_client_that_disconnects_while_queued_is_charged_nothing(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    first, second = gateway.create_key(), gateway.create_key(tokens_a_day=2000)
    second_worker.script = Script(hang=True)
    lanes = (lane_report("vlm", slots=1),)
    second_worker.status_report = second_worker.report(lanes=lanes)
    with (
        repeated(lambda: gateway.send_heartbeat(second_worker, lanes=lanes)),
        ThreadPoolExecutor(1) as executor,
    ):
        gateway.use_key(first["secret"])
        running = executor.submit(gateway.chat)
        wait_until(lambda: second_worker.in_flight == 1)
        worker.script = BUSY
        gateway.send_heartbeat(worker)
        gateway.use_key(second["secret"])
        # The first worker returns 503; the request then queues for a second, busy worker.
        leave_once(gateway, lambda: waits(gateway), second["secret"])
        assert len(worker.requests) == 1
        wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 1)
        assert remaining_tokens(gateway.chat(temperature=9)) == 2000
        second_worker.resume.set()
        assert running.result().status_code == 200


def test_a_client_that_leaves_after_a_worker_has_begun_is_charged_whatever_the_next_one_says(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    first, second = gateway.create_key(), gateway.create_key(tokens_a_day=2000)
    full = ScriptedWorker(worker_id="fake-c", script=Script(hang=True))
    lanes = (lane_report("vlm", slots=1),)
    full.status_report = full.report(lanes=lanes)  # a look at the status asks the worker again
    with (
        running_server(full, sockets=[full.socket]),
        repeated(lambda: gateway.send_heartbeat(full, lanes=lanes)),
        ThreadPoolExecutor(1) as executor,
    ):
        gateway.use_key(first["secret"])
        running = executor.submit(gateway.chat)
        wait_until(lambda: full.in_flight == 1)
        worker.script, second_worker.script = Script(status=500), BUSY
        gateway.send_heartbeat(worker)
        gateway.send_heartbeat(second_worker, lanes=(lane_report("vlm", waiting=40),))
        gateway.use_key(second["secret"])
        # The first worker fails, the second one returns 503; the request queues for the third.
        leave_once(gateway, lambda: waits(gateway), second["secret"], max_tokens=100)
        assert (len(worker.requests), len(second_worker.requests)) == (1, 1)
        wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 1)
        assert remaining_tokens(gateway.chat(temperature=9)) == 2000 - PROMPT_TOKENS - 100
        full.resume.set()
        assert running.result().status_code == 200


def test_a_request_counts_as_concurrent_until_its_last_byte(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    shared_gateway.use_key(shared_gateway.create_key(concurrent_requests=2)["secret"])
    module_worker.script = Script(hang_after=2)
    with shared_gateway.stream() as first, shared_gateway.stream() as second:
        # The variable prevents that a collected iterator closes its stream.
        streams = first.iter_raw(), second.iter_raw()
        assert all(next(stream) for stream in streams)
        rejected = shared_gateway.chat()
        assert status_and_code(rejected) == (429, "concurrent_requests_exceeded")
        assert rejected.headers["retry-after"] == "1"
    wait_until(lambda: module_worker.in_flight == 0)
    module_worker.script = Script()
    wait_until(lambda: shared_gateway.chat().status_code == 200)


def test_concurrent_requests_do_not_exceed_the_limit(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    key = shared_gateway.create_key(requests_a_minute=7)
    url = f"{shared_gateway.url}/v1/chat/completions"
    with ThreadPoolExecutor(16) as pool:
        responses = list(
            pool.map(
                lambda _: (
                    httpx.post(
                        url, json=chat_body(), headers=bearer_headers(key), timeout=60
                    ).status_code
                ),
                range(32),
            )
        )
    assert responses.count(200) == len(module_worker.requests)
    assert 7 <= responses.count(200) <= 8, "the limit refills once in eight seconds"
    assert set(responses) == {200, 429}


def test_a_daily_limit_survives_a_restart(tmp_path: Path, worker: ScriptedWorker) -> None:
    with RunningGateway(make_settings(tmp_path)) as first:
        first.send_heartbeat(worker)
        secret = first.create_key(tokens_a_day=2000)["secret"]
        first.use_key(secret)
        assert first.chat(max_tokens=10).status_code == 200
    with RunningGateway(make_settings(tmp_path)) as second:
        second.send_heartbeat(worker)
        second.use_key(secret)
        assert (
            remaining_tokens(second.chat(max_tokens=10)) == 2000 - USED_TOKENS - PROMPT_TOKENS - 10
        )
