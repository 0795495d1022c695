"""What a key with limits gets of a real worker, by every way to get more."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paceline.protocol import TOKENS_HEADER, TOKENS_LIMIT_HEADER
from tests.support.running_gateway import RunningGateway, bearer_headers, wait_until
from tests.support.served_engine import gateway_of
from tests.support.worker_process import SUPPRESS_END_TOKENS, RunningWorker

BUDGET = 1000
PATH = "/v1/chat/completions"
# The demo model has a token for each digit, and a reservation assumes three characters.
DIGITS = "0123456789" * 25
TOOL = {"name": "look", "description": DIGITS, "parameters": {"type": "object"}}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "a", "arguments": f'{{"b":"{DIGITS}"}}'},
}


@pytest.fixture
def gateway(tmp_path, real_worker, monkeypatch) -> Iterator[RunningGateway]:
    """Run a gateway that the worker of the session has joined."""
    monkeypatch.setattr("gateway.proxy.billing.ANSWER_TOKENS", 256)
    with gateway_of(tmp_path, real_worker) as running:
        yield running


def used_tokens(worker: RunningWorker) -> int:
    """Return the tokens of all requests that the worker has ended."""
    lanes = httpx.get(f"{worker.url}/v1/status", timeout=60).json()["report"]["lanes"]
    return sum(lane["prompt_tokens"] + lane["completion_tokens"] for lane in lanes)


def rows(worker: RunningWorker) -> int:
    lanes = httpx.get(f"{worker.url}/v1/status", timeout=60).json()["report"]["lanes"]
    return sum(lane["running"] + lane["waiting"] for lane in lanes)


def question(text: str = DIGITS) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def leave_stream(client: httpx.Client, **fields: Any) -> int:
    """Leave a stream after its second piece."""
    with client.stream("POST", PATH, json={"stream": True, **fields}) as response:
        pieces = response.iter_raw()
        for _ in range(2):
            next(pieces, b"")
        return response.status_code


def leave_answer(client: httpx.Client, **fields: Any) -> int:
    with contextlib.suppress(httpx.ReadTimeout):
        return client.post(PATH, json=fields, timeout=0.3).status_code
    return 0


def read_answer(client: httpx.Client, **fields: Any) -> int:
    return client.post(PATH, json=fields).status_code


WAYS: dict[str, tuple[Callable[..., int], dict[str, Any]]] = {
    "left streams": (leave_stream, {"max_tokens": 8}),
    "tools": (
        leave_stream,
        {
            "messages": question("a"),
            "tools": [{"type": "function", "function": TOOL}],
            "max_tokens": 8,
        },
    ),
    "tool calls": (
        leave_stream,
        {
            "messages": [
                *question("a"),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "b"},
            ],
            "max_tokens": 8,
        },
    ),
    "no end": (read_answer, {"messages": question("a"), "logit_bias": SUPPRESS_END_TOKENS}),
    "left answers": (
        leave_answer,
        {"messages": question("a"), "logit_bias": SUPPRESS_END_TOKENS, "max_tokens": 250},
    ),
    "answers in parallel": (read_answer, {"n": 2, "max_tokens": 8}),
}


@pytest.mark.parametrize("way", WAYS)
def test_c6_a_key_gets_no_more_than_its_budget_by_any_way(gateway, real_worker, way) -> None:
    key = gateway.create_key(tokens_a_day=BUDGET)
    before = used_tokens(real_worker)
    send, fields = WAYS[way]
    body = {"model": real_worker.model, "messages": question(), **fields}

    def attack() -> int:
        """Send requests until the budget is spent, and return how many were begun."""
        with httpx.Client(base_url=gateway.url, headers=bearer_headers(key), timeout=120) as client:
            for begun in range(10):
                status = send(client, **body)
                if status == 429:
                    return begun
                assert status in (0, 200)
        raise AssertionError("the budget is not spent")

    with ThreadPoolExecutor(8) as pool:
        attacks = [pool.submit(attack) for _ in range(8)]
    begun = sum(one.result() for one in attacks)
    wait_until(lambda: rows(real_worker) == 0, within_s=60)
    begun += attack()  # by then the reservations of the others are settled
    wait_until(lambda: rows(real_worker) == 0, within_s=60)
    assert begun
    assert used_tokens(real_worker) - before <= BUDGET * 1.1


def test_c6_a_worker_reads_no_prompt_above_the_limit_of_tokens(real_worker: RunningWorker) -> None:
    before = used_tokens(real_worker)
    body = {"model": real_worker.model, "messages": question(), "max_tokens": 10, "n": 2}

    def ask(limit: str) -> httpx.Response:
        headers = {TOKENS_LIMIT_HEADER: limit}
        return httpx.post(f"{real_worker.url}{PATH}", json=body, headers=headers, timeout=120)

    refused = ask("200")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "tokens_over_limit"
    assert used_tokens(real_worker) == before
    needed = int(refused.headers[TOKENS_HEADER])
    assert ask(str(needed - 1)).status_code == 400
    answered = ask(str(needed))
    assert answered.json()["usage"]["prompt_tokens"] == needed - 2 * 10
    for invalid in ("", "0", "-1", "1.5", "x", "9" * 17):
        assert ask(invalid).json()["error"]["param"] == TOKENS_LIMIT_HEADER
