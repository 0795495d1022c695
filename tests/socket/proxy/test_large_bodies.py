"""Large bodies: inspected in a thread, in turns, and charged before."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import inspection_thread, strict_json
from gateway.api import responses
from gateway.protocols.responses import ResponsesFormat
from gateway.proxy import handler
from gateway.strict_json import _BOUNDS as BOUNDS
from gateway.strict_json import parse
from tests.support.running_gateway import (
    RunningGateway,
    chat_body,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import ScriptedWorker
from tests.support.threads import record_threads

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


def test_a_large_body_reaches_its_worker_whole(gateway_with_worker, worker) -> None:
    key = gateway_with_worker.create_key(tokens_a_minute=20_000_000)
    gateway_with_worker.use_key(key["secret"])
    texts = ["word " * 500_000, '"\n\u20ac' * 200_000, *["medium " * 20_000] * 9, ""]
    content = [{"type": "text", "text": text} for text in texts]
    body = chat_body(messages=[{"role": "user", "content": content}])
    assert gateway_with_worker.chat(**body).status_code == 200
    sent = worker.requests[-1].body
    assert sent["messages"] == body["messages"]
    assert sent["max_tokens"], "the limit of a key adds it to the encoded body"


def test_c16_a_large_body_is_counted_beside_the_event_loop(
    gateway_with_worker, monkeypatch
) -> None:
    """To count 32 MB holds up other requests by 100 ms."""
    threads = record_threads(monkeypatch, (inspection_thread, "footprint_bytes"))
    body = chat_body(messages=[{"role": "user", "content": "word " * 200_000}])
    assert gateway_with_worker.chat(**body).status_code == 200
    assert threads == {"inspection_0"}


def test_c16_a_small_body_that_stands_for_much_is_inspected_beside_the_event_loop(
    gateway_with_worker, monkeypatch
) -> None:
    client = gateway_with_worker.client
    item = {"role": "user", "content": "word " * 200_000}
    made = client.post("/v1/conversations", json={"items": [item]}).json()
    listed = client.get(f"/v1/conversations/{made['id']}/items").json()
    threads = record_threads(monkeypatch, (ResponsesFormat, "_inspect"))
    body = {"model": "demo", "input": [{"id": listed["first_id"]}], "store": False}
    assert client.post("/v1/responses", json=body).status_code == 200
    assert threads == {"inspection_0"}


@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/completions"])
def test_c16_many_values_are_read_beside_the_event_loop(
    gateway_with_worker, monkeypatch, path
) -> None:
    """The items of a conversation held it up by 225 ms, and the tokens of a prompt by 80 ms."""
    threads = record_threads(monkeypatch, (responses, "check_items"), (handler, "parse"))
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}] * 2_000}
    body = {"items": [item]} if "conv" in path else {"model": "demo", "prompt": [1] * 20_000}
    assert gateway_with_worker.client.post(path, json=body).status_code == 200
    assert threads == {"inspection_0"}


def test_large_bodies_are_inspected_one_at_a_time(gateway_with_worker, held, send) -> None:
    first, second = (send(gateway_with_worker, LARGE) for _ in range(2))
    wait_until(lambda: gateway_with_worker.requests_in_flight() == 2 and held.parsed > 0)
    assert gateway_with_worker.chat().status_code == 200
    assert held.parsed == 1
    held.release.set()
    assert [one.result().status_code for one in (first, second)] == [200, 200]


def test_c16_a_key_pays_for_a_large_body_before_it_is_inspected(gateway_with_worker, held) -> None:
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
def test_a_request_has_at_most_10000_messages(gateway_with_worker, path, body) -> None:
    refused = gateway_with_worker.client.post(path, content=json.dumps(body))
    assert refused.status_code == 400
    assert "10000" in refused.json()["error"]["message"]


def converse(gateway: RunningGateway, *contents: Any, **fields: Any) -> httpx.Response:
    items = [{"role": "user", "content": content, **fields} for content in contents]
    return gateway.client.post("/v1/conversations", json={"items": items})


def test_c16_conversations_are_shed_as_requests(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.script.hang_after = 2
    with RunningGateway(make_settings(tmp_path, requests_limit=1)) as gateway:
        gateway.join(worker)
        made = converse(gateway, "Hi").json()
        path = f"/v1/conversations/{made['id']}"
        with gateway.stream() as running:
            chunks = running.iter_raw()
            next(chunks)
            for refused in (converse(gateway, "Hi"), gateway.client.get(path)):
                assert status_and_code(refused) == (503, "gateway_overloaded")


def test_c16_kept_items_have_the_fields_of_their_type_alone(gateway_with_worker) -> None:
    part = {"type": "output_text", "text": "Hi", "annotations": [], "padding": [[]] * 9}
    made = converse(gateway_with_worker, [part], role="assistant", padding=[[]] * 9).json()
    path = f"/v1/conversations/{made['id']}/items"
    new = {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}}
    assert gateway_with_worker.client.post(path, json={"items": [new]}).status_code == 200
    call, item = gateway_with_worker.client.get(path).json()["data"]
    assert call == {"id": call["id"], "type": "shell_call", "call_id": "c1"}
    said = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    assert item["content"] == [said]
    assert item.keys() == {"id", "type", "role", "content", "status"}


def test_c16_a_conversation_has_the_bounds_of_a_body(gateway_with_worker, monkeypatch) -> None:
    """Many bodies within the bounds would else make one record that takes long to read."""
    made = converse(gateway_with_worker, "word " * 20_000).json()
    bounds = [(marks, limit if marks != b"," else 20, name) for marks, limit, name in BOUNDS]
    monkeypatch.setattr(strict_json, "_BOUNDS", bounds)
    path = f"/v1/conversations/{made['id']}/items"
    item = {"role": "user", "content": "a,b," * 20}
    refused = gateway_with_worker.client.post(path, json={"items": [item]})
    assert status_and_code(refused) == (400, "invalid_value")
    assert len(gateway_with_worker.client.get(path).json()["data"]) == 1
