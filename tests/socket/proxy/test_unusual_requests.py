"""Invalid usage, and idempotency keys."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.gateway_fixtures import Served
from tests.support.raw_client import wait_for_outcomes
from tests.support.scripted_worker import DONE, chat_completion, event, stream_events

INVALID_USAGE: dict[str, Any] = {
    "missing": None,
    "negative": {"prompt_tokens": -7, "completion_tokens": -3},
    "text": {"prompt_tokens": "many", "completion_tokens": True},
    "a list": [1, 2],
    "fractions": {"prompt_tokens": 1.5, "completion_tokens": 2.5},
}


@pytest.mark.parametrize("usage", INVALID_USAGE.values(), ids=INVALID_USAGE)
def test_f53_missing_or_invalid_usage_fails_no_response_and_no_sum(
    served: Served, usage: Any
) -> None:
    *events, _usage, done = stream_events(("one",))
    trailing = [event({"choices": [], "usage": usage})] if usage is not None else []
    served.worker.script.events = (*events, *trailing, done)
    assert served.gateway.chat(stream=True).content.endswith(DONE)
    served.worker.script.body = json.dumps(chat_completion("one") | {"usage": usage}).encode()
    assert served.gateway.chat().status_code == 200
    wait_for_outcomes(served.gateway, completed=2)
    tokens = served.gateway.status()["models"]["demo"]["tokens"]
    assert all(count >= 0 for count in tokens.values())


def test_f58_requests_with_one_idempotency_key_are_not_deduplicated(served: Served) -> None:
    served.gateway.client.headers["idempotency-key"] = "the-same"
    with ThreadPoolExecutor(2) as executor:
        responses = [executor.submit(served.gateway.chat) for _ in range(2)]
    assert [response.result().status_code for response in responses] == [200, 200]
    assert len(served.worker.requests) == 2
    assert "idempotency-key" not in served.worker.requests[0].headers
