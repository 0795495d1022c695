"""Rate limits: 429 responses, rate-limit headers, reservation and settlement of tokens."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from paceline.protocol import RUNNING_USAGE_TOKENS, TOKENS_HEADER, TOKENS_LIMIT_HEADER
from tests.support.heartbeats import send_heartbeats
from tests.support.raw_client import leave_once
from tests.support.running_gateway import (
    RunningGateway,
    chat_body,
    make_settings,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, USAGE, Script, ScriptedWorker, event, lane_report

PROMPT_TOKENS = 16 + -(-len("Say a word.") // 3)
"""Reserved for the prompt of `chat_body`."""
BUSY = Script(status=503, headers=((b"retry-after", b"60"),))
"""Without the header the gateway would ask again after a second, when these clients leave."""
USED_TOKENS = sum(cast("int", USAGE[name]) for name in ("prompt_tokens", "completion_tokens"))


def test_a_429_has_openais_error_format_and_retry_after(shared_gateway: RunningGateway) -> None:
    shared_gateway.use_new_key(requests_a_minute=2, tokens_a_minute=5000)
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


def test_streams_and_errors_carry_rate_limit_headers_if_the_key_has_limits(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.use_new_key()
    headers = gateway_with_worker.chat().headers
    assert not [name for name in headers if name.startswith("x-ratelimit")]
    gateway_with_worker.use_new_key(requests_a_minute=9)
    with gateway_with_worker.stream() as response:
        assert response.headers["x-ratelimit-remaining-requests"] == "8"
        assert response.read().endswith(DONE)
    assert gateway_with_worker.chat(temperature=9).headers["x-ratelimit-remaining-requests"] == "8"
    worker.script = Script(status=500)
    broken = gateway_with_worker.chat()
    assert broken.status_code == 502
    assert broken.headers["x-ratelimit-remaining-requests"] == "7"


def remaining_tokens(response: httpx.Response) -> int:
    return int(response.headers["x-ratelimit-remaining-tokens"])


def test_f52_tokens_are_reserved_before_and_settled_with_the_workers_usage(shared_gateway) -> None:
    # A day, because a minute refills while the test runs.
    shared_gateway.use_new_key(tokens_a_day=2000)
    first, second = (shared_gateway.chat(max_tokens=500) for _ in range(2))
    assert remaining_tokens(first) == 2000 - PROMPT_TOKENS - 500
    assert remaining_tokens(second) == 2000 - USED_TOKENS - PROMPT_TOKENS - 500


def test_a_rejected_request_consumes_no_limit_and_an_explanation_no_tokens(shared_gateway) -> None:
    shared_gateway.use_new_key(tokens_a_day=2000, requests_a_minute=50)
    for fields in (
        {"temperature": 9},
        {"model": "unknown-model"},
        {"max_tokens": 10_000},
        {"nonsense": True},
    ):
        response = shared_gateway.chat(**fields)
        assert response.status_code in {400, 404}
        assert remaining_tokens(response) == 2000
        assert response.headers["x-ratelimit-remaining-requests"] == "50"
    shared_gateway.use_new_key(requests_a_minute=2, tokens_a_day=2000)
    path = "/v1/route/explain"
    responses = [shared_gateway.client.post(path, json=chat_body()) for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert status_and_code(responses[-1]) == (429, "requests_a_minute_exceeded")
    assert remaining_tokens(shared_gateway.chat()) == 2000, "C16"


def test_a_request_that_no_worker_serves_consumes_no_tokens(gateway, worker) -> None:
    gateway.use_new_key(tokens_a_day=2000, requests_a_minute=50)
    for _ in range(2):
        response = gateway.chat(max_tokens=10)
        assert status_and_code(response) == (503, "no_worker")
        assert remaining_tokens(response) == 2000
        assert response.headers["x-ratelimit-remaining-requests"] == "50"
    gateway.join(worker)
    worker.script = Script(cut_after=2)
    with gateway.stream(max_tokens=100) as response:
        assert b"worker_lost" in response.read()
    worker.script = Script(status=500)
    assert remaining_tokens(gateway.chat(max_tokens=100)) == 2000


def test_c6_a_stream_that_is_left_costs_the_reservation_or_the_usage_reported_so_far(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    """LiteLLM #38176, #23714, #11083: budgets that some paths do not enforce."""
    frame = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    usage = {"prompt_tokens": 30, "completion_tokens": 3}
    reporting = (event(frame | {"usage": usage}), event(frame), event(frame))
    reserved = PROMPT_TOKENS + 100
    for events, charged in ((None, reserved), (reporting, 30 + 3 + 2 * RUNNING_USAGE_TOKENS)):
        shared_gateway.use_new_key(tokens_a_day=2000)
        module_worker.reset()
        module_worker.script = Script(events=events, hang_after=3)
        with shared_gateway.stream(max_tokens=100) as response:
            received = b""
            for piece in response.iter_raw():
                received += piece
                if received.count(b"content") == 3:
                    break
        assert module_worker.client_disconnected.wait(60)
        assert b'"usage":{' not in received
        module_worker.script = Script()
        wait_until(lambda: shared_gateway.requests_in_flight() == 0)
        remaining = remaining_tokens(shared_gateway.chat(max_tokens=100))
        assert remaining == 2000 - charged - reserved


@contextlib.contextmanager
def full_worker(gateway: RunningGateway, worker: ScriptedWorker) -> Iterator[None]:
    """Use the only row of a worker while the context lasts."""
    worker.script = Script(hang=True)
    worker.status_report = worker.report(lanes=(lane_report("vlm", slots=1),))
    with send_heartbeats(gateway, worker), ThreadPoolExecutor(1) as executor:
        running = executor.submit(gateway.chat)
        wait_until(lambda: worker.in_flight == 1)
        yield
        worker.resume.set()
        assert running.result().status_code == 200


def leave_the_queue(gateway: RunningGateway, secret: str, **fields: Any) -> int:
    """Disconnect while a request waits for a row; return the tokens that the key has left."""
    leave_once(gateway, lambda: gateway.status()["pools"]["vlm"]["waiting"] > 0, secret, **fields)
    wait_until(lambda: gateway.requests_in_flight() == 1)
    gateway.use_key(secret)
    return remaining_tokens(gateway.chat(temperature=9))


def test_a_client_that_disconnects_while_queued_is_charged_nothing(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway.use_new_key()
    with full_worker(gateway, second_worker):
        worker.script = BUSY
        gateway.join(worker)
        # The first worker returns 503; the request then queues for a second, busy worker.
        secret = gateway.create_key(tokens_a_day=2000)["secret"]
        assert leave_the_queue(gateway, secret) == 2000
        assert len(worker.requests) == 1


def test_a_client_that_leaves_after_a_worker_has_begun_is_charged_whatever_the_next_one_says(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway.use_new_key()
    full = ScriptedWorker(worker_id="fake-c")
    with running_server(full, sockets=[full.socket]), full_worker(gateway, full):
        worker.script, second_worker.script = Script(status=500), BUSY
        gateway.join(worker)
        gateway.join(second_worker, lanes=(lane_report("vlm", waiting=40),))
        # The first worker fails, the second one returns 503; the request queues for the third.
        secret = gateway.create_key(tokens_a_day=2000)["secret"]
        left = leave_the_queue(gateway, secret, max_tokens=100)
        assert left == 2000 - PROMPT_TOKENS - 100
        assert (len(worker.requests), len(second_worker.requests)) == (1, 1)


def test_a_request_counts_as_concurrent_until_its_last_byte(shared_gateway, module_worker) -> None:
    shared_gateway.use_new_key(concurrent_requests=2)
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


def test_a_daily_limit_survives_a_restart(tmp_path: Path, worker: ScriptedWorker) -> None:
    with RunningGateway(make_settings(tmp_path)) as first:
        first.join(worker)
        secret = first.use_new_key(tokens_a_day=2000)["secret"]
        assert first.chat(max_tokens=10).status_code == 200
    with RunningGateway(make_settings(tmp_path)) as second:
        second.join(worker)
        second.use_key(secret)
        remaining = remaining_tokens(second.chat(max_tokens=10))
        assert remaining == 2000 - USED_TOKENS - PROMPT_TOKENS - 10


def refusal(tokens: int) -> Script:
    """Return a worker's refusal of a request that may need so many tokens."""
    error = b'{"error": {"message": "too many", "code": "tokens_over_limit"}}'
    return Script(status=400, body=error, headers=((TOKENS_HEADER.encode(), b"%d" % tokens),))


def test_c6_a_worker_gets_the_reservation_as_its_limit_and_no_client_sets_it(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.client.headers[TOKENS_LIMIT_HEADER] = "999999"
    gateway_with_worker.chat(max_tokens=100)
    assert TOKENS_LIMIT_HEADER not in worker.requests[-1].headers
    gateway_with_worker.use_new_key(tokens_a_day=2000)
    assert gateway_with_worker.chat(max_tokens=100).status_code == 200
    assert worker.requests[-1].headers[TOKENS_LIMIT_HEADER] == str(PROMPT_TOKENS + 100)


@pytest.mark.parametrize(
    ("default", "limit", "reserved"),
    [(300, 2000, 300), (100_000, 2000, 1024), (100_000, 16_000, 2000), (0, 16_000, 1024)],
)
def test_c6_the_default_of_the_model_is_reserved_and_sent_as_max_tokens(
    gateway: RunningGateway, worker: ScriptedWorker, default: int, limit: int, reserved: int
) -> None:
    gateway.join(worker, default_max_tokens=default)
    gateway.chat()
    assert "max_tokens" not in worker.requests[-1].body
    gateway.use_new_key(tokens_a_day=limit)
    assert remaining_tokens(gateway.chat()) == limit - PROMPT_TOKENS - reserved
    assert worker.requests[-1].body["max_tokens"] == reserved


def test_c6_a_prompt_above_the_estimate_is_reserved_exactly_before_it_is_read_or_gets_429(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    shared_gateway.use_new_key(tokens_a_day=2000)
    module_worker.script = Script(rotation=(refusal(900), Script()))
    response = shared_gateway.chat(max_tokens=100)
    assert (response.status_code, response.headers["x-paceline-attempts"]) == (200, "1")
    limits = [int(request.headers[TOKENS_LIMIT_HEADER]) for request in module_worker.requests]
    assert limits == [PROMPT_TOKENS + 100, 900]
    module_worker.script = refusal(1999)
    for _ in range(6):
        response = shared_gateway.chat(max_tokens=100)
        assert status_and_code(response) == (429, "tokens_a_day_exceeded")
    module_worker.script = refusal(2001)
    response = shared_gateway.chat(max_tokens=100)
    assert status_and_code(response) == (400, "tokens_over_limit")
    module_worker.script = Script()
    response = shared_gateway.chat(max_tokens=100)
    assert remaining_tokens(response) == 2000 - 10 - PROMPT_TOKENS - 100
    assert shared_gateway.client.get("/readyz").status_code == 200, "none is ejected"


def test_c6_an_answer_without_a_stream_that_is_left_costs_all_that_the_worker_may_use(
    shared_gateway: RunningGateway, module_worker: ScriptedWorker
) -> None:
    secret = shared_gateway.create_key(tokens_a_day=4000)["secret"]
    module_worker.script = Script(rotation=(refusal(900), Script(hang=True)))
    leave_once(shared_gateway, lambda: len(module_worker.requests) == 2, secret, max_tokens=100)
    assert module_worker.client_disconnected.wait(60)
    shared_gateway.use_new_key()
    wait_until(lambda: shared_gateway.requests_in_flight() == 0)
    module_worker.script = Script()
    shared_gateway.use_key(secret)
    remaining = remaining_tokens(shared_gateway.chat(max_tokens=100))
    assert remaining == 4000 - 900 - PROMPT_TOKENS - 100
