"""Events that are larger than a gateway keeps: no worker is at fault, and the key pays."""

import pytest
from openai import InternalServerError, OpenAI

from gateway.proxy import forward
from tests.support.raw_client import stream_error_code
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    said,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, chunk

FIRST = chunk({"role": "assistant", "content": ""})
LARGE = chunk({"content": "x" * 2_000_000})
REFUSAL = (
    b'data: {"error":{"message":"Too costly.","type":"invalid_request_error",'
    b'"param":"response_format","code":"constraint_too_costly"}}\n\n'
)


def state(gateway: RunningGateway) -> str:
    return str(gateway.status()["workers"]["fake-a"]["state"])


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ((FIRST, LARGE, chunk({}, "stop"), DONE), "response_too_large"),
        ((FIRST, REFUSAL), "constraint_too_costly"),
    ],
    ids=["an event that is too large", "a refusal in the answer"],
)
def test_c23_an_end_that_the_request_has_caused_ejects_nobody_and_costs_the_reservation(
    gateway_with_worker, worker, second_worker, events, code
) -> None:
    gateway_with_worker.join(second_worker)
    worker.script = second_worker.script = Script(events=events)
    key = gateway_with_worker.create_key(tokens_a_day=100_000)
    gateway_with_worker.use_key(key["secret"])
    for number in range(12):
        response = gateway_with_worker.chat(**said(f"{number}"), stream=True, max_tokens=100)
        assert stream_error_code(response.content) == code
    assert state(gateway_with_worker) == "ready"
    assert len(worker.requests) + len(second_worker.requests) == 12, "none was tried twice"
    wait_until(lambda: gateway_with_worker.charged_tokens(key) >= 12 * 100)


def test_c23_a_refusal_in_an_answer_without_a_stream_costs_the_reservation(
    gateway_with_worker, worker
) -> None:
    """Another refusal comes before the worker has begun, and costs nothing."""
    for code, cost in (("unsupported_value", 0), ("constraint_too_costly", 100)):
        body = b'{"error":{"message":"No.","type":"invalid_request_error","code":"%b"}}'
        worker.script = Script(status=400, body=body % code.encode())
        key = gateway_with_worker.create_key(tokens_a_day=100_000)
        response = gateway_with_worker.chat(max_tokens=100, headers=bearer_headers(key))
        assert status_and_code(response) == (400, code)
        wait_until(lambda key=key, cost=cost: gateway_with_worker.charged_tokens(key) >= cost)  # type: ignore[misc]
        assert bool(gateway_with_worker.charged_tokens(key)) == bool(cost)


def test_c23_one_body_counts_once_at_the_circuit_breaker_of_each_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    """A body that fails everywhere ejects nobody; one that another worker answers is no excuse."""
    gateway_with_worker.join(second_worker)
    worker.script = second_worker.script = Script(status=500, body=b"{}")
    for _ in range(20):
        assert status_and_code(gateway_with_worker.chat()) == (502, "worker_failed")
    assert state(gateway_with_worker) == "ready"
    second_worker.script = Script()
    wait_until(
        lambda: gateway_with_worker.chat().is_success and state(gateway_with_worker) == "ejected"
    )


def test_c23_the_client_of_openai_does_not_repeat_a_request_whose_answer_is_too_large(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time would cost the reservation, and a second answer would be as large."""
    monkeypatch.setattr(forward, "_WHOLE_LIMIT_BYTES", 1000)
    worker.script = Script(body=b'{"choices": "%b"}' % (b"x" * 2000))
    with (
        OpenAI(base_url=f"{gateway_with_worker.url}/v1", api_key="none") as client,
        pytest.raises(InternalServerError, match="too large"),
    ):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "a"}])
    assert len(worker.requests) == 1
