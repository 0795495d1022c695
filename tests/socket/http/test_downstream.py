"""HTTP/1.1 to clients, byte by byte: headers, slow senders and stalled readers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from gateway.assembly import Timing
from tests.support.raw_client import PATH, chat_request, open_socket, read_error, read_stream
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import DONE, ScriptedWorker, chunk, stream_events
from workers.http import HeadTooLarge

OFTEN = Timing(check_s=0.05)


def test_f43_endless_headers_return_431(gateway_with_worker: RunningGateway) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * HeadTooLarge.limit_bytes)
        assert read_error(raw) == (431, "headers_too_large", True)


def test_f43_too_many_headers_return_431(gateway_with_worker: RunningGateway) -> None:
    headers = b"".join(b"x-%d: y\r\n" % number for number in range(HeadTooLarge.limit_headers))
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n")
        assert read_error(raw) == (431, "headers_too_large", True)


def test_f10_slow_headers_return_408_while_other_clients_are_served(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, head_timeout_s=0.5)
    with RunningGateway(settings, OFTEN) as gateway, contextlib.ExitStack() as stack:
        slow = []
        for _ in range(200):
            slow.append(stack.enter_context(open_socket(gateway)))
            slow[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert httpx.get(f"{gateway.url}/livez", timeout=60).status_code == 200
        assert {read_error(raw) for raw in slow} == {(408, "headers_timeout", True)}


def test_the_headers_timeout_applies_to_the_second_request_of_a_connection(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, head_timeout_s=0.5)
    with RunningGateway(settings, OFTEN) as gateway, open_socket(gateway) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.recv(4096).endswith(b"alive\n")
        raw.sendall(b"GET /livez HTTP/1.1\r\n")
        assert read_error(raw) == (408, "headers_timeout", True)


def test_an_idle_connection_is_closed_without_a_response(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, head_timeout_s=0.2)
    with (
        RunningGateway(settings, OFTEN) as gateway,
        open_socket(gateway) as raw,
        contextlib.suppress(ConnectionResetError),
    ):
        assert raw.recv(1) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx: a\rb\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n"
        b"content-length: 5\r\n\r\nabcd",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    ],
    ids=["tls", "no-colon", "bare-cr", "two-framings", "two-lengths", "negative-length"],
)
def test_f43_malformed_http_returns_400(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, data: bytes
) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(data)
        assert read_error(raw) == (400, "invalid_http", True)
    assert not worker.requests


def test_f39_a_client_that_continues_to_send_can_read_the_413(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, body_limit_bytes=1000)
    with RunningGateway(settings) as gateway, open_socket(gateway) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 10000000\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"x" * 4_000_000)
        assert read_error(raw) == (413, "body_too_large", True)


def test_two_pipelined_requests_get_responses_in_order(
    gateway_with_worker: RunningGateway,
) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(
            chat_request()
            + chat_request(stream=True)
            + b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        received = b""
        while not received.endswith(b"alive\n"):
            received += raw.recv(65536)
    assert received.index(b"one two three") < received.index(DONE) < received.index(b"alive")


def test_an_http_1_0_client_gets_an_unchunked_body_until_the_connection_closes(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.pause_s = 0.01  # each word is one chunk
    for stream in (False, True):
        with open_socket(gateway_with_worker) as raw:
            raw.sendall(chat_request(stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
            received = b""
            while data := raw.recv(65536):
                received += data
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if stream:
            assert body == b"".join(stream_events(worker.script.tokens)[:-2]) + DONE
        else:
            assert json.loads(body)["choices"]


def test_an_error_response_to_head_has_no_body(gateway_with_worker: RunningGateway) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"HEAD %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % PATH)
        received = raw.recv(65536)
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while data := raw.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 405 ")
    assert b"content-length: " in received
    assert received.split(b"\r\n\r\n")[1].startswith(b"HTTP/1.1 200 OK")


def test_c2_requests_that_are_sent_while_others_run_are_all_answered(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    texts = [f"{number} {'x' * 20_000}" for number in range(60)]  # several reads of the gateway
    requests = [chat_request(messages=[{"role": "user", "content": text}]) for text in texts]
    with open_socket(gateway_with_worker) as raw:
        sending = threading.Thread(target=raw.sendall, args=(b"".join(requests),))
        sending.start()
        received = b""
        while received.count(b"one two three") < len(requests) and (piece := raw.recv(65536)):
            received += piece
        sending.join()
    assert received.count(b"HTTP/1.1 200 OK") == len(requests)
    contents = [request.body["messages"][0]["content"] for request in worker.requests]
    assert contents == texts


@pytest.mark.parametrize(("word_bytes", "words"), [(60_000, 200), (600, 20_000)])
def test_a_reader_that_pauses_longer_than_the_idle_timeout_gets_every_word(
    tmp_path: Path, worker: ScriptedWorker, word_bytes: int, words: int
) -> None:
    word = "x" * word_bytes
    worker.script.events = (*[chunk({"content": word})] * words, *stream_events(("end",)))
    with RunningGateway(make_settings(tmp_path, idle_timeout_s=0.5), OFTEN) as gateway:
        gateway.send_heartbeat(worker)
        with open_socket(gateway) as raw:
            raw.sendall(chat_request(stream=True))
            assert worker.request_received.wait(60)
            time.sleep(0.8)
            received = read_stream(raw)
        assert received.count(word.encode()) == words
        assert DONE in received
        assert gateway.chat().status_code == 200
        assert gateway.status()["outcomes"] == {"completed": 2}


@pytest.mark.parametrize("following", [b"\r\n", b"GET /livez HTTP/1.1\r\nhost: local"])
def test_the_headers_timeout_of_a_pipelined_request_starts_after_the_response(
    tmp_path: Path, worker: ScriptedWorker, following: bytes
) -> None:
    worker.script.pause_s = 0.2  # per event; all six last longer than the timeout and its check
    with RunningGateway(make_settings(tmp_path, head_timeout_s=0.6), OFTEN) as gateway:
        gateway.send_heartbeat(worker)
        with open_socket(gateway) as raw:
            raw.sendall(chat_request(stream=True))
            assert worker.request_received.wait(60)
            raw.sendall(following)
            assert DONE in read_stream(raw)


def test_invalid_bytes_after_a_request_do_not_enter_its_stream(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(chat_request(stream=True))
        received = raw.recv(65536)
        raw.sendall(b"no HTTP at all\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while data := raw.recv(65536):
                received += data
    assert b"invalid_http" not in received
    assert worker.client_disconnected.wait(60)


def test_f09_a_stalled_reader_is_disconnected_and_the_worker_freed(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    settings = make_settings(tmp_path, write_timeout_s=0.5)
    worker.script.events = (chunk({"content": "x" * 8000}),) * 10_000
    with RunningGateway(settings, OFTEN) as gateway:
        gateway.send_heartbeat(worker)
        with open_socket(gateway) as raw:
            raw.sendall(chat_request(stream=True))
            assert worker.request_received.wait(60)
            # The 80 MB stay at the worker until the client reads; other clients are served.
            assert gateway.client.get("/livez").status_code == 200
            assert worker.client_disconnected.wait(60)
            wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 0)
        assert gateway.status()["outcomes"] == {"client_left": 1}


def test_f09_a_slow_reader_is_not_disconnected(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path, write_timeout_s=3)
    words = ("x" * 60_000,) * 100
    worker.script.tokens = words
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as response:
            received = b""
            for data in response.iter_raw():
                received += data
                time.sleep(0.001)
    assert received.startswith(b"".join(stream_events(words)[:-2]))


def test_a_request_over_its_timeout_returns_504(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.script.hang = True
    with RunningGateway(make_settings(tmp_path, request_timeout_s=0.2), OFTEN) as gateway:
        gateway.send_heartbeat(worker)
        response = gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        assert worker.client_disconnected.wait(60)


def test_a_stream_over_its_timeout_ends_in_an_error_event(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with RunningGateway(make_settings(tmp_path, request_timeout_s=0.5), OFTEN) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as response:
            received = response.read()
        assert b'"code":"request_timeout"' in received
        assert not received.endswith(DONE)
        assert worker.client_disconnected.wait(60)


@pytest.mark.parametrize("packets", [1, 2])
def test_an_upgrade_request_is_served_over_http_1_1(
    gateway_with_worker: RunningGateway, packets: int
) -> None:
    upgrade = chat_request(temperature=0).replace(
        b"host: localhost\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nHost: localhost\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nUpgrade: h2c\r\n",
    )
    head, _, body = upgrade.partition(b"\r\n\r\n")
    with open_socket(gateway_with_worker) as raw:
        if packets == 1:
            raw.sendall(upgrade)
        else:
            raw.sendall(head + b"\r\n\r\n")
            raw.sendall(body)
        received = raw.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"one two three" in received
        raw.sendall(chat_request())
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_connect_returns_400(gateway_with_worker: RunningGateway) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_error(raw) == (400, "invalid_http", True)


def test_expect_100_continue_gets_100_continue(
    gateway_with_worker: RunningGateway,
) -> None:
    head, _, body = chat_request().partition(b"\r\n\r\n")
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        raw.sendall(body)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")
