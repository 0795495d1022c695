"""The edge of the gateway, byte by byte: heads, slow senders, readers that stall."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import httpx
import pytest

from gateway.http.downstream import HEAD_LIMIT_BYTES, HEADERS_LIMIT
from tests.support.raw_client import PATH, chat_request, open_socket, read_error, read_stream
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import DONE, ScriptedWorker, chunk, stream_events


def test_f43_a_head_that_never_ends_is_a_431(gateway_with_worker: RunningGateway) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * HEAD_LIMIT_BYTES)
        assert read_error(raw) == (431, "headers_too_large", True)


def test_f43_too_many_headers_are_a_431(gateway_with_worker: RunningGateway) -> None:
    headers = b"".join(b"x-%d: y\r\n" % number for number in range(HEADERS_LIMIT))
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n")
        assert read_error(raw) == (431, "headers_too_large", True)


def test_f10_a_head_that_dribbles_is_a_408_and_its_neighbour_is_served(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, head_timeout_s=0.2)
    with RunningGateway(settings) as gateway, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(open_socket(gateway)) for _ in range(200)]
        for raw in slow:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert httpx.get(f"{gateway.url}/livez").status_code == 200
        assert {read_error(raw) for raw in slow} == {(408, "headers_timeout", True)}


def test_the_second_head_of_a_connection_is_bounded_too(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, head_timeout_s=0.2)
    with RunningGateway(settings) as gateway, open_socket(gateway) as raw:
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert raw.recv(4096).endswith(b"alive\n")
        raw.sendall(b"GET /livez HTTP/1.1\r\n")
        assert read_error(raw) == (408, "headers_timeout", True)


def test_a_connection_that_asks_nothing_is_closed_without_a_word(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, head_timeout_s=0.2)
    with (
        RunningGateway(settings) as gateway,
        open_socket(gateway) as raw,
        contextlib.suppress(ConnectionResetError),
    ):
        assert raw.recv(1) == b""


@pytest.mark.parametrize(
    "sent",
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
def test_f43_what_is_no_clear_http_is_a_400(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, sent: bytes
) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(sent)
        assert read_error(raw) == (400, "invalid_http", True)
    assert not worker.requests


def test_f39_a_client_that_sends_on_can_read_why_its_body_was_refused(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, body_limit_bytes=1000)
    with RunningGateway(settings) as gateway, open_socket(gateway) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 10000000\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"x" * 4_000_000)
        assert read_error(raw) == (413, "body_too_large", True)


def test_two_requests_in_one_packet_are_answered_in_turn(
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


def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_with_the_connection(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.pause_s = 0.01  # each word comes by itself, in a chunk of its own
    for stream in (False, True):
        with open_socket(gateway_with_worker) as raw:
            raw.sendall(chat_request(stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
            received = b""
            while piece := raw.recv(65536):
                received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if stream:
            assert body == b"".join(stream_events(worker.script.tokens)[:-2]) + DONE
        else:
            assert json.loads(body)["choices"]


def test_a_refusal_of_head_has_no_body(gateway_with_worker: RunningGateway) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"HEAD %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % PATH)
        received = raw.recv(65536)
        raw.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        while piece := raw.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 405 ")
    assert b"content-length: " in received
    assert received.split(b"\r\n\r\n")[1].startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(("word_bytes", "words"), [(60_000, 200), (600, 20_000)])
def test_a_reader_that_pauses_for_longer_than_a_worker_may_gets_every_word(
    tmp_path: Path, worker: ScriptedWorker, word_bytes: int, words: int
) -> None:
    word = "x" * word_bytes
    worker.script.events = (*[chunk({"content": word})] * words, *stream_events(("end",)))
    with RunningGateway(make_settings(tmp_path, idle_timeout_s=0.5)) as gateway:
        gateway.send_heartbeat(worker)
        with open_socket(gateway) as raw:
            raw.sendall(chat_request(stream=True))
            assert worker.request_received.wait(10)
            time.sleep(1.5)
            received = read_stream(raw)
        assert received.count(word.encode()) == words
        assert DONE in received
        assert gateway.chat().status_code == 200
        assert gateway.status()["outcomes"] == {"completed": 2}


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /livez HTTP/1.1\r\nhost: local"])
def test_what_comes_behind_a_request_has_its_time_once_that_is_answered(
    tmp_path: Path, worker: ScriptedWorker, behind: bytes
) -> None:
    worker.script.pause_s = 0.6  # of four events: longer than a head may take, and a look besides
    with RunningGateway(make_settings(tmp_path, head_timeout_s=0.3)) as gateway:
        gateway.send_heartbeat(worker)
        with open_socket(gateway) as raw:
            raw.sendall(chat_request(stream=True))
            assert worker.request_received.wait(10)
            raw.sendall(behind)
            assert DONE in read_stream(raw)


def test_garbage_behind_a_running_stream_never_gets_into_it(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(chat_request(stream=True))
        received = raw.recv(65536)
        raw.sendall(b"no HTTP at all\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                received += piece
    assert b"invalid_http" not in received
    assert worker.client_disconnected.wait(10)


def test_f09_a_reader_that_stalls_is_cut_and_frees_the_worker(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    settings = make_settings(tmp_path, write_timeout_s=0.5)
    worker.script.events = tuple(chunk({"content": "x" * 8000}) for _ in range(10_000))
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        with open_socket(gateway) as raw:
            raw.sendall(chat_request(stream=True))
            assert worker.request_received.wait(10)
            # Its 80 MB wait for a reader: they stay with the worker, and others are served.
            assert gateway.client.get("/livez").status_code == 200
            assert worker.client_disconnected.wait(30)
            wait_until(lambda: gateway.status()["gateway"]["requests_in_flight"] == 0)
        assert gateway.status()["outcomes"] == {"client_left": 1}


def test_f09_a_slow_reader_that_reads_is_not_cut(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path, write_timeout_s=3)
    words = tuple("x" * 60_000 for _ in range(200))
    worker.script.tokens = words
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as response:
            received = b""
            for piece in response.iter_raw():
                received += piece
                time.sleep(0.001)
    assert received.startswith(b"".join(stream_events(words)[:-2]))


def test_a_request_past_its_time_is_a_504(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.script.hang = True
    with RunningGateway(make_settings(tmp_path, request_timeout_s=0.2)) as gateway:
        gateway.send_heartbeat(worker)
        response = gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
        assert worker.client_disconnected.wait(10)


def test_a_stream_past_its_time_ends_in_an_error_event(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    with RunningGateway(make_settings(tmp_path, request_timeout_s=0.5)) as gateway:
        gateway.send_heartbeat(worker)
        with gateway.stream() as response:
            received = response.read()
        assert b'"code":"request_timeout"' in received
        assert not received.endswith(DONE)
        assert worker.client_disconnected.wait(10)


@pytest.mark.parametrize("packets", [1, 2])
def test_a_request_that_asks_for_another_protocol_is_served_in_this_one(
    gateway_with_worker: RunningGateway, packets: int
) -> None:
    asked = chat_request(temperature=0).replace(
        b"host: localhost\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nHost: localhost\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nUpgrade: h2c\r\n",
    )
    head, _, body = asked.partition(b"\r\n\r\n")
    with open_socket(gateway_with_worker) as raw:
        if packets == 1:
            raw.sendall(asked)
        else:
            raw.sendall(head + b"\r\n\r\n")
            raw.sendall(body)
        received = raw.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"one two three" in received
        raw.sendall(chat_request())
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_no_tunnel_is_opened(gateway_with_worker: RunningGateway) -> None:
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_error(raw) == (400, "invalid_http", True)


def test_a_client_that_asks_first_whether_to_send_its_body_is_told_to(
    gateway_with_worker: RunningGateway,
) -> None:
    head, _, body = chat_request().partition(b"\r\n\r\n")
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        raw.sendall(body)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")
