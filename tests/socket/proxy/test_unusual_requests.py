"""Requests nested too deeply, invalid usage, and idempotency keys."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.raw_client import wait_for_outcomes
from tests.support.running_gateway import RunningGateway, status_and_code
from tests.support.scripted_worker import (
    DONE,
    ScriptedWorker,
    chat_completion,
    event,
    stream_events,
)


@pytest.mark.parametrize("depth", [201, 100_000])
def test_f40_a_body_nested_too_deeply_returns_400_and_reaches_no_worker(
    module_gateway: RunningGateway, module_worker: ScriptedWorker, depth: int
) -> None:
    for nested in (b"[" * depth, b"[" * depth + b"]" * depth):
        body = b'{"model": %b}' % nested
        response = module_gateway.client.post("/v1/chat/completions", content=body)
        assert status_and_code(response) == (400, "invalid_json")
    assert module_worker.requests == []


INVALID_USAGE: dict[str, Any] = {
    "missing": None,
    "negative": {"prompt_tokens": -7, "completion_tokens": -3},
    "text": {"prompt_tokens": "many", "completion_tokens": True},
    "a list": [1, 2],
    "fractions": {"prompt_tokens": 1.5, "completion_tokens": 2.5},
}


@pytest.mark.parametrize("usage", INVALID_USAGE.values(), ids=INVALID_USAGE)
def test_f53_missing_or_invalid_usage_fails_no_response_and_no_sum(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, usage: Any
) -> None:
    *events, _usage, done = stream_events(("one",))
    trailing = [event({"choices": [], "usage": usage})] if usage is not None else []
    worker.script.events = (*events, *trailing, done)
    assert gateway_with_worker.chat(stream=True).content.endswith(DONE)
    worker.script.body = json.dumps(chat_completion("one") | {"usage": usage}).encode()
    assert gateway_with_worker.chat().status_code == 200
    wait_for_outcomes(gateway_with_worker, completed=2)
    tokens = gateway_with_worker.status()["models"]["demo"]["tokens"]
    assert all(count >= 0 for count in tokens.values())


def test_f58_requests_with_one_idempotency_key_are_not_deduplicated(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_worker.client.headers["idempotency-key"] = "the-same"
    with ThreadPoolExecutor(2) as executor:
        responses = [executor.submit(gateway_with_worker.chat) for _ in range(2)]
    assert [response.result().status_code for response in responses] == [200, 200]
    assert len(worker.requests) == 2
    assert "idempotency-key" not in worker.requests[0].headers
