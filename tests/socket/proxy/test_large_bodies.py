"""Large bodies: inspected in a thread, in turns, and charged before."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.proxy import handler
from gateway.strict_json import parse
from tests.support.running_gateway import RunningGateway, chat_body, status_and_code, wait_until

LARGE = chat_body(messages=[{"role": "user", "content": "Hi"}] * 2_000)
MANY = chat_body(messages=[{"role": "user", "content": "Hi"}] * 10_001)


class HeldThread:
    """Holds each large body that is parsed, until it is released."""

    def __init__(self) -> None:
        self.parsed = 0
        self.release = threading.Event()

    def parse(self, raw: bytes) -> dict[str, Any]:
        if len(raw) > 10_000:
            self.parsed += 1
            assert self.release.wait(60)
        return parse(raw)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldThread]:
    thread = HeldThread()
    monkeypatch.setattr(handler, "parse", thread.parse)
    yield thread
    thread.release.set()


@pytest.fixture
def send() -> Iterator[Callable[..., Future[httpx.Response]]]:
    """Send chats from threads of their own."""
    with ThreadPoolExecutor(4) as pool:
        yield lambda gateway, body: pool.submit(gateway.chat, **body)


def test_c16_small_requests_are_answered_while_a_large_body_is_inspected(
    gateway_with_worker: RunningGateway, held: HeldThread, send: Callable[..., Any]
) -> None:
    large = send(gateway_with_worker, LARGE)
    wait_until(lambda: held.parsed == 1)
    assert gateway_with_worker.chat().status_code == 200
    assert not large.done()
    held.release.set()
    assert large.result().status_code == 200


def test_large_bodies_are_inspected_one_at_a_time(
    gateway_with_worker: RunningGateway, held: HeldThread, send: Callable[..., Any]
) -> None:
    first, second = (send(gateway_with_worker, LARGE) for _ in range(2))
    wait_until(lambda: gateway_with_worker.status()["gateway"]["requests_in_flight"] == 2)
    assert held.parsed == 1
    held.release.set()
    assert [one.result().status_code for one in (first, second)] == [200, 200]


def test_c16_a_key_pays_for_a_large_body_before_it_is_inspected(
    gateway_with_worker: RunningGateway, held: HeldThread
) -> None:
    gateway_with_worker.use_key(gateway_with_worker.create_key(requests_a_minute=1)["secret"])
    held.release.set()
    assert status_and_code(gateway_with_worker.chat(**MANY)) == (400, "invalid_value")
    refused = gateway_with_worker.chat(**LARGE)
    assert status_and_code(refused) == (429, "requests_a_minute_exceeded")
    assert held.parsed == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", MANY),
        ("/v1/messages", {"max_tokens": 1, **MANY}),
        ("/v1/responses", {"model": MANY["model"], "input": MANY["messages"]}),
        ("/v1/route/explain", MANY),
    ],
)
def test_a_request_has_at_most_10000_messages(
    gateway_with_worker: RunningGateway, path: str, body: dict[str, Any]
) -> None:
    refused = gateway_with_worker.client.post(path, content=json.dumps(body))
    assert refused.status_code == 400
    assert "10000" in refused.json()["error"]["message"]
