"""The tokens that a key's reservation allows a worker to use."""

from __future__ import annotations

import httpx
import pytest

from tests.support.raw_client import leave_once
from tests.support.running_gateway import RunningGateway, status_and_code, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker
from workers.protocol import TOKENS_HEADER, TOKENS_LIMIT_HEADER

PROMPT_TOKENS = 16 + -(-len("Say a word.") // 3)
"""Reserved for the prompt of `chat_body`."""


def refusal(tokens: int) -> Script:
    """Return a worker's refusal of a request that may need so many tokens."""
    error = b'{"error": {"message": "too many", "code": "tokens_over_limit"}}'
    return Script(status=400, body=error, headers=((TOKENS_HEADER.encode(), b"%d" % tokens),))


def use_key(gateway: RunningGateway, tokens_a_day: int) -> None:
    gateway.use_key(gateway.create_key(tokens_a_day=tokens_a_day)["secret"])


def remaining_tokens(response: httpx.Response) -> int:
    return int(response.headers["x-ratelimit-remaining-tokens"])


def test_c6_a_worker_gets_the_reservation_as_its_limit_and_no_client_sets_it(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.client.headers[TOKENS_LIMIT_HEADER] = "999999"
    gateway_with_worker.chat(max_tokens=100)
    assert TOKENS_LIMIT_HEADER not in worker.requests[-1].headers
    use_key(gateway_with_worker, 2000)
    assert gateway_with_worker.chat(max_tokens=100).status_code == 200
    assert worker.requests[-1].headers[TOKENS_LIMIT_HEADER] == str(PROMPT_TOKENS + 100)


@pytest.mark.parametrize(
    ("default", "limit", "reserved"),
    [(300, 2000, 300), (100_000, 2000, 1024), (100_000, 16_000, 2000), (0, 16_000, 1024)],
)
def test_c6_the_default_of_the_model_is_reserved_and_sent_as_max_tokens(
    gateway: RunningGateway, worker: ScriptedWorker, default: int, limit: int, reserved: int
) -> None:
    gateway.send_heartbeat(worker, default_max_tokens=default)
    gateway.chat()
    assert "max_tokens" not in worker.requests[-1].body
    use_key(gateway, limit)
    assert remaining_tokens(gateway.chat()) == limit - PROMPT_TOKENS - reserved
    assert worker.requests[-1].body["max_tokens"] == reserved


def test_c6_a_prompt_above_the_estimate_is_reserved_exactly_before_it_is_read(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    use_key(gateway_with_worker, 2000)
    worker.script = Script(rotation=(refusal(900), Script()))
    response = gateway_with_worker.chat(max_tokens=100)
    assert (response.status_code, response.headers["x-paceline-attempts"]) == (200, "1")
    limits = [int(request.headers[TOKENS_LIMIT_HEADER]) for request in worker.requests]
    assert limits == [PROMPT_TOKENS + 100, 900]


def test_c6_a_prompt_above_what_remains_gets_429_and_ejects_no_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    use_key(gateway_with_worker, 2000)
    assert gateway_with_worker.chat(max_tokens=100).status_code == 200
    worker.script = refusal(1999)
    for _ in range(6):
        response = gateway_with_worker.chat(max_tokens=100)
        assert status_and_code(response) == (429, "tokens_a_day_exceeded")
    worker.script = refusal(2001)
    response = gateway_with_worker.chat(max_tokens=100)
    assert status_and_code(response) == (400, "tokens_over_limit")
    worker.script = Script()
    response = gateway_with_worker.chat(max_tokens=100)
    assert remaining_tokens(response) == 2000 - 10 - PROMPT_TOKENS - 100
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "ready"


def test_c6_an_answer_without_a_stream_that_is_left_costs_all_that_the_worker_may_use(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    secret = gateway_with_worker.create_key(tokens_a_day=4000)["secret"]
    gateway_with_worker.use_key(secret)
    worker.script = Script(rotation=(refusal(900), Script(hang=True)))
    leave_once(gateway_with_worker, lambda: len(worker.requests) == 2, secret, max_tokens=100)
    assert worker.client_disconnected.wait(10)
    wait_until(lambda: gateway_with_worker.status()["gateway"]["requests_in_flight"] == 0)
    worker.script = Script()
    remaining = remaining_tokens(gateway_with_worker.chat(max_tokens=100))
    assert remaining == 4000 - 900 - PROMPT_TOKENS - 100
