"""One budget for all that a gateway holds for its clients: each holder is shed, and gives back."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from gateway.responses.exchange import EventLog
from tests.support.gateway_fixtures import MakeGateway
from tests.support.pdfs import base64_pdf, pdf
from tests.support.raw_client import open_socket, raw_client, read_stream, request_bytes
from tests.support.running_gateway import (
    RunningGateway,
    chat_body,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker, chat_completion, stream_events

SMALL = 400_000
"""Some hundred kilobytes of text take more, parsed and written again."""
TEXT = "word " * 30_000
USER = [{"role": "user", "content": TEXT}]
PDF = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{base64_pdf(pdf(TEXT))}"}
OVERLOADED = (503, "gateway_overloaded")


@pytest.fixture
def small(make_gateway: MakeGateway, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    """Run a gateway with little memory, and check at the end that it has given back all."""
    gateway = make_gateway(worker, check_s=0.05, memory_limit_bytes=SMALL)
    yield gateway
    worker.resume.set()
    wait_until(lambda: gateway.memory_held_bytes() == 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "file", "file": PDF}]}]},
        ),
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/embeddings", {"input": TEXT}),
        ("/v1/rerank", {"query": "q", "documents": [TEXT]}),
        ("/v2/rerank", {"query": "q", "documents": [TEXT]}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/responses/input_tokens", {"input": TEXT}),
        ("/v1/conversations", {"items": USER}),
        ("/v1/route/explain", {"messages": USER}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_f26_each_route_sheds_a_body_for_which_there_is_no_memory(small, path, body) -> None:
    if path != "/v1/conversations":
        body = {"model": "demo", **body}
    of_anthropic = path.startswith("/v1/messages")
    headers = {"anthropic-version": "2023-06-01"} if of_anthropic else {}
    shed = small.client.post(path, json=body, headers=headers)
    assert shed.status_code == 503
    error = shed.json()["error"]
    if of_anthropic:
        assert (shed.json()["type"], error["type"]) == ("error", "overloaded_error")
    else:
        assert error["code"] == "gateway_overloaded"
    assert shed.headers["retry-after"] == "1"
    assert small.memory_held_bytes() == 0
    assert small.chat().status_code == 200


@contextlib.contextmanager
def half_a_body(gateway: RunningGateway, size_bytes: int) -> Iterator[None]:
    """Send a part of a body, and leave at the end."""
    with raw_client(gateway) as client:
        begun = request_bytes(b" " * size_bytes, path="/v1/conversations")
        client.send(begun.replace(b"length: ", b"length: 1"))
        wait_until(lambda: gateway.memory_held_bytes() >= size_bytes)
        yield


def test_f26_bodies_that_never_end_shed_what_short_requests_refer_to(make_gateway, worker) -> None:
    gateway = make_gateway(worker, memory_limit_bytes=4_000_000)
    client = gateway.client
    items = [{"role": "user", "content": TEXT}]
    name = client.post("/v1/conversations", json={"items": items}).json()["id"]
    path = f"/v1/conversations/{name}"
    body = {"model": "demo", "input": "Hi"}
    kept = client.post("/v1/responses", json={**body, "input": TEXT}).json()["id"]
    stored_bytes = gateway.memory_held_bytes()
    asks: list[Callable[[], httpx.Response]] = [
        lambda: client.get(f"{path}/items"),
        lambda: client.post(f"{path}/items", json={"items": [{"role": "user", "content": "Hi"}]}),
        lambda: client.post("/v1/responses", json={**body, "conversation": name, "store": False}),
        lambda: client.get(f"/v1/responses/{kept}/input_items"),
        lambda: client.post(
            "/v1/responses", json={**body, "previous_response_id": kept, "store": False}
        ),
    ]
    with half_a_body(gateway, 2_500_000):
        assert [status_and_code(ask()) for ask in asks] == [OVERLOADED] * len(asks)
        assert gateway.chat().status_code == 200
    wait_until(lambda: gateway.memory_held_bytes() == stored_bytes)
    assert [ask().status_code for ask in asks] == [200] * len(asks)
    assert client.delete(path).status_code == client.delete(f"/v1/responses/{kept}").status_code
    wait_until(lambda: gateway.memory_held_bytes() == 0)


def test_f26_a_client_that_holds_the_most_leaves_room_for_another(make_gateway, worker) -> None:
    gateway = make_gateway(worker, memory_limit_bytes=SMALL)
    keys = [gateway.create_key()["secret"] for _ in range(2)]
    large = request_bytes(b" " * 310_000, path="/v1/conversations", secret=keys[0])
    with raw_client(gateway) as client:
        client.send(large.replace(b"length: ", b"length: 1"))
        gateway.use_key(keys[1])
        wait_until(lambda: gateway.memory_held_bytes() >= 310_000)
        gateway.use_key(keys[0])
        assert status_and_code(gateway.chat(user="x" * 3000)) == OVERLOADED
        gateway.use_key(keys[1])
        assert gateway.chat(user="x" * 3000).status_code == 200
    wait_until(lambda: gateway.memory_held_bytes() == 0)


ENDS: dict[str, Script] = {
    "answered": Script(),
    "refused by the worker": Script(status=400, body=b'{"error": {"message": "no"}}'),
    "lost": Script(drop=True),
    "broken": Script(cut_after=1),
    "no answer": Script(body=b"{}"),
    "too large": Script(body=json.dumps(chat_completion(TEXT * 4)).encode()),
}


@pytest.mark.parametrize("script", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_f26_each_end_of_a_request_gives_its_memory_back(
    small: RunningGateway, worker: ScriptedWorker, script: Script, path: str, *, stream: bool
) -> None:
    """The fixture checks it."""
    worker.script = script
    body = {**chat_body(), "input": "Hi", "max_tokens": 9, "store": False, "stream": stream}
    small.client.post(path, json=body)


@pytest.mark.parametrize("stream", [False, True])
def test_f26_a_client_that_leaves_gives_its_memory_back(small, worker, *, stream) -> None:
    worker.script = Script(hang=True)
    with raw_client(small) as client:
        client.send_chat(stream=stream)
        assert worker.request_received.wait(30)
        assert small.memory_held_bytes() > 0
    wait_until(lambda: small.memory_held_bytes() == 0)


def test_f26_a_revoked_key_gives_its_memory_back(small, worker) -> None:
    worker.script = Script(hang=True)
    key, other = small.create_key(), small.create_key()
    with raw_client(small) as client:
        client.send(request_bytes(json.dumps(chat_body()).encode(), secret=key["secret"]))
        assert worker.request_received.wait(30)
        small.use_key(other["secret"])
        assert small.memory_held_bytes() > 0
        small.revoke_key(key)
        assert b"401" in client.read_until(b"error")
    wait_until(lambda: small.memory_held_bytes() == 0)


def test_f26_an_answer_for_which_there_is_no_memory_is_shed_and_blames_no_worker(
    small: RunningGateway, worker: ScriptedWorker
) -> None:
    """Its worker has written it, so it costs its reservation."""
    worker.script = Script(body=json.dumps(chat_completion(TEXT)).encode())
    key = small.use_new_key(tokens_a_day=10_000)
    for _ in range(4):
        assert status_and_code(small.chat(max_tokens=100)) == OVERLOADED
    assert small.charged_tokens(key) >= 4 * 100
    worker.script = Script()
    assert small.chat().status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": chat_body()["messages"], "max_tokens": 9}),
        ("/v1/responses", {"input": "Hi", "store": False}),
        (
            "/v1/chat/completions",
            chat_body(tools=[{"type": "function", "function": {"name": "f"}}]),
        ),
    ],
    ids=["messages", "responses", "calls"],
)
def test_f26_a_stream_that_collects_more_than_there_is_memory_for_ends_in_an_error(
    small: RunningGateway, worker: ScriptedWorker, path: str, body: dict[str, Any]
) -> None:
    worker.script = Script(tokens=(TEXT,) * 4)
    key = small.use_new_key(tokens_a_day=10_000)
    received = small.client.post(path, json={"model": "demo", "stream": True, **body}).text
    last = received.removesuffix("data: [DONE]\n\n").rpartition("data: ")[2]
    assert "The gateway is overloaded." in last
    assert small.charged_tokens(key) >= 9


def slots_in_use(gateway: RunningGateway) -> int:
    lanes = gateway.status()["workers"]["fake-a"]["lanes"].values()
    return sum(lane["in_flight"] for lane in lanes)


def test_f26_a_whole_answer_that_nobody_reads_is_held_and_occupies_no_slot(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    gateway = make_gateway(worker)
    worker.script = Script(body=json.dumps(chat_completion("word " * 3_000_000)).encode())
    with raw_client(gateway) as client:
        client.send_chat()
        wait_until(lambda: gateway.memory_held_bytes() > 15_000_000)
        wait_until(lambda: worker.in_flight == 0)
        wait_until(lambda: not slots_in_use(gateway))
        assert gateway.requests_in_flight() == 1
        assert client.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
    wait_until(lambda: gateway.memory_held_bytes() == 0)
    worker.script = Script()
    assert gateway.chat().status_code == 200


def start_in_background(gateway: RunningGateway, **fields: Any) -> str:
    body = {"model": "demo", "input": "Hi", "background": True, **fields}
    return str(gateway.client.post("/v1/responses", json=body).json()["id"])


def ended(gateway: RunningGateway, name: str) -> Callable[[], bool]:
    path = f"/v1/responses/{name}"
    return lambda: gateway.client.get(path).json()["status"] not in ("queued", "in_progress")


def test_f26_a_log_counts_until_it_is_deleted_and_a_follower_that_reads_nothing_for_a_piece(
    make_gateway: MakeGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    take = EventLog._events_from

    def record(log: EventLog, place: int) -> list[bytes]:
        found = take(log, place)
        sent.append(sum(map(len, found)))
        return found

    gateway = make_gateway(worker)
    worker.script = Script(tokens=("x" * 10_000,) * 200)
    name = start_in_background(gateway)
    wait_until(ended(gateway, name))
    log_bytes = gateway.memory_held_bytes()
    assert log_bytes > 10_000_000
    monkeypatch.setattr(EventLog, "_events_from", record)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(open_socket(gateway))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        raw.sendall(b"GET /v1/responses/%b?stream=true HTTP/1.1\r\n" % name.encode())
        raw.sendall(b"host: localhost\r\n\r\n")
        wait_until(lambda: bool(sent))
        assert gateway.client.delete(f"/v1/responses/{name}").status_code == 200
        assert log_bytes * 0.8 < gateway.memory_held_bytes() < log_bytes + 1_000_000
        assert sum(sent) < log_bytes * 0.8, "what the system's buffers take, and a piece"
        received = read_stream(raw)
        assert b"response.completed" in received
    wait_until(lambda: gateway.memory_held_bytes() == 0)


def test_f26_a_response_in_the_background_beyond_the_memory_fails_and_gives_it_back(
    small: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(events=stream_events(["x" * 10_000] * 40))
    name = start_in_background(small)
    wait_until(ended(small, name))
    shown = small.client.get(f"/v1/responses/{name}").json()
    assert shown["status"] == "failed"
    assert small.client.delete(f"/v1/responses/{name}").status_code == 200
