"""Answers that a legal request makes large: how they come, whom they cost, and what they cost."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.model.test_key_limits import rows, used_tokens
from tests.support.running_gateway import RunningGateway, bearer_headers, wait_until
from tests.support.served_engine import gateway_of
from tests.support.worker_process import RunningWorker
from workers.server.response import EVENT_LIMIT_BYTES

PROMPT = "The red fox sees the old tree. " * 80
"""More than 600 tokens, whose scores fill several events."""
SCORED: Any = {"prompt": PROMPT, "echo": True, "logprobs": 20, "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory, real_worker) -> Iterator[RunningGateway]:
    with gateway_of(tmp_path_factory.mktemp("gateway"), real_worker) as running:
        yield running


@pytest.fixture
def key(gateway: RunningGateway) -> dict[str, Any]:
    return gateway.create_key(tokens_a_day=1_000_000)


@pytest.fixture
def client(gateway: RunningGateway, key: dict[str, Any]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, headers=bearer_headers(key), timeout=120) as client:
        yield client


def test_c23_the_scored_prompt_of_an_echo_comes_in_small_events_and_ejects_nobody(
    gateway, real_worker, client, key
) -> None:
    """What OpenAI's package reads of the stream adds up to the whole answer."""
    body = {"model": real_worker.model, **SCORED}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]
    before = used_tokens(real_worker)
    spent = gateway.charged_tokens(key)
    for _ in range(5):
        raw = client.post("/v1/completions", json={**body, "stream": True}).content
        assert raw.endswith(b"data: [DONE]\n\n")
        assert max(map(len, raw.split(b"\n\n"))) <= EVENT_LIMIT_BYTES < len(raw)
    with OpenAI(base_url=f"{gateway.url}/v1", api_key=key["secret"], max_retries=0) as openai:
        chunks = [
            one.choices[0]
            for one in openai.completions.create(model=real_worker.model, stream=True, **SCORED)
        ]
    assert "".join(chunk.text for chunk in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs]
        listed = [one for part in parts for one in part]
        whole_list = whole["logprobs"][name]
        if name in ("tokens", "text_offset"):
            assert listed == whole_list
        assert [one is None for one in listed] == [one is None for one in whole_list]
    status = client.get("/v1/status").json()
    assert status["workers"][real_worker.worker_id]["state"] == "ready"
    used = used_tokens(real_worker) - before
    wait_until(lambda: gateway.charged_tokens(key) - spent >= used)


def test_c6_prompts_that_are_read_before_a_stream_is_left_are_charged(
    gateway, real_worker, client, key
) -> None:
    """Of 32 prompts, 29 were answered; the usage of each was told when it was read."""
    before = used_tokens(real_worker)
    for index in range(2):
        prompts = [f"{index} {at} {PROMPT[:300]}" for at in range(32)]
        body = {"model": real_worker.model, "prompt": prompts, "max_tokens": 1, "stream": True}
        ends = 0
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                ends += '"finish_reason":"' in line
                if ends == 29:
                    break
        wait_until(lambda: rows(real_worker) == 0)
    used = used_tokens(real_worker) - before
    assert used > 2 * 29 * 50
    wait_until(lambda: gateway.charged_tokens(key) >= used)


def test_the_usage_of_a_prompt_is_told_once_it_is_read(real_worker: RunningWorker) -> None:
    body = {
        "model": real_worker.model,
        "prompt": [f"{at} {PROMPT[:300]}" for at in range(8)],
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    raw = httpx.post(f"{real_worker.url}/v1/completions", json=body, timeout=60).content
    events = [json.loads(one[6:]) for one in raw.split(b"\n\n") if one.startswith(b"data: {")]
    told = [event["usage"]["prompt_tokens"] for event in events if event.get("usage")]
    assert len(set(told)) == 8
    assert told == sorted(told)
