"""HTTP/1.1 to clients, byte by byte: headers, slow senders and stalled readers."""

import contextlib
import json
import threading
import time

import pytest

from paceline.http import HeadTooLarge
from tests.support.gateway_fixtures import MakeGateway, Served
from tests.support.raw_client import (
    PATH,
    chat_request,
    open_socket,
    raw_client,
    read_error,
    read_stream,
    stream_error_code,
)
from tests.support.running_gateway import RunningGateway, said, status_and_code
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, chunk, stream_events

OFTEN = {"check_s": 0.05}
GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
TOO_LARGE = (
    b"POST / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * HeadTooLarge.limit_bytes,
    POST + b"x: y\r\n" * HeadTooLarge.limit_headers + b"\r\n",
)
MALFORMED = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no colon": POST + b"bad header\r\n\r\n",
    "bare cr": POST + b"x: a\rb\r\n\r\n",
    "two framings": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 4\r\ncontent-length: 5\r\n\r\nabcd",
    "negative length": POST + b"content-length: -1\r\n\r\n",
    "connect": b"CONNECT localhost:22 HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


def test_f43_headers_without_end_return_431_and_malformed_http_400(shared: Served) -> None:
    for name, data in MALFORMED.items():
        with open_socket(shared.gateway) as raw:
            raw.sendall(data)
            assert read_error(raw) == (400, "invalid_http", True), name
    for data in TOO_LARGE:
        with open_socket(shared.gateway) as raw:
            raw.sendall(data)
            assert read_error(raw) == (431, "headers_too_large", True)
    assert not shared.worker.requests


def test_f10_slow_headers_return_408_while_other_clients_are_served(make_gateway) -> None:
    gateway = make_gateway(**OFTEN, head_timeout_s=0.5)
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(200):
            slow.append(stack.enter_context(open_socket(gateway)))
            slow[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert gateway.client.get("/livez").status_code == 200
        assert {read_error(raw) for raw in slow} == {(408, "headers_timeout", True)}
    with open_socket(gateway) as raw:
        raw.sendall(GET)
        assert raw.recv(4096).endswith(b"alive\n")
        raw.sendall(b"GET /livez HTTP/1.1\r\n")
        assert read_error(raw) == (408, "headers_timeout", True), "the second request's too"


def test_an_idle_connection_is_closed_without_a_response(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(**OFTEN, head_timeout_s=0.2)
    with open_socket(gateway) as raw, contextlib.suppress(ConnectionResetError):
        assert raw.recv(1) == b""


def test_f39_a_client_that_continues_to_send_can_read_the_413(make_gateway: MakeGateway) -> None:
    with open_socket(make_gateway(body_limit_bytes=1000)) as raw:
        raw.sendall(POST + b"content-length: 10000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"x" * 4_000_000)
        assert read_error(raw) == (413, "body_too_large", True)


def test_an_http_1_0_client_gets_an_unchunked_body_until_the_connection_closes(shared) -> None:
    shared.worker.script.pause_s = 0.01  # each word is one chunk
    for stream in (False, True):
        with raw_client(shared.gateway) as client:
            client.send(chat_request(stream=stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
            received = client.read_to_end()
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        if stream:
            assert body == b"".join(stream_events(shared.worker.script.tokens)[:-2]) + DONE
        else:
            assert json.loads(body)["choices"]


def test_an_error_response_to_head_has_no_body(shared_gateway: RunningGateway) -> None:
    with raw_client(shared_gateway) as client:
        client.send(b"HEAD %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % PATH)
        received = client.read_until(b"\r\n\r\n")
        client.send(GET.replace(b"host:", b"connection: close\r\nhost:"))
        received += client.read_to_end()
    assert received.startswith(b"HTTP/1.1 405 ")
    assert b"content-length: " in received
    assert received.split(b"\r\n\r\n")[1].startswith(b"HTTP/1.1 200 OK")


def test_c2_requests_that_are_sent_while_others_run_are_all_answered(shared: Served) -> None:
    texts = [f"{number} {'x' * 20_000}" for number in range(60)]  # several reads of the gateway
    requests = [chat_request(**said(text)) for text in texts]
    with open_socket(shared.gateway) as raw:
        sending = threading.Thread(target=raw.sendall, args=(b"".join(requests),))
        sending.start()
        received = b""
        while received.count(b"one two three") < len(requests) and (piece := raw.recv(65536)):
            received += piece
        sending.join()
    assert received.count(b"HTTP/1.1 200 OK") == len(requests)
    contents = [request.body["messages"][0]["content"] for request in shared.worker.requests]
    assert contents == texts


@pytest.mark.parametrize(("word_bytes", "words"), [(60_000, 200), (600, 20_000)])
def test_a_reader_that_pauses_longer_than_the_idle_timeout_gets_every_word(
    make_gateway: MakeGateway, worker: ScriptedWorker, word_bytes: int, words: int
) -> None:
    word = "x" * word_bytes
    worker.script.events = (*[chunk({"content": word})] * words, *stream_events(("end",)))
    gateway = make_gateway(worker, **OFTEN, idle_timeout_s=0.5)
    with open_socket(gateway) as raw:
        raw.sendall(chat_request(stream=True))
        assert worker.request_received.wait(60)
        worker.scripts_by_message["stall"] = Script(hang_after=1)
        with gateway.stream(**said("stall")) as stalled:
            assert stream_error_code(stalled.read()) == "worker_stalled"  # by the same timeout
        received = read_stream(raw)
    assert received.count(word.encode()) == words
    assert DONE in received
    assert gateway.chat().status_code == 200
    assert gateway.status()["outcomes"] == {"completed": 2, "failed": 1}


@pytest.mark.parametrize("following", [b"\r\n", b"GET /livez HTTP/1.1\r\nhost: local"])
def test_the_headers_timeout_of_a_pipelined_request_starts_after_the_response(
    make_gateway: MakeGateway, worker: ScriptedWorker, following: bytes
) -> None:
    worker.script.pause_s = 0.2  # per event; all six last longer than the timeout and its check
    with open_socket(make_gateway(worker, **OFTEN, head_timeout_s=0.6)) as raw:
        raw.sendall(chat_request(stream=True))
        assert worker.request_received.wait(60)
        raw.sendall(following)
        assert DONE in read_stream(raw)


def test_invalid_bytes_after_a_request_do_not_enter_its_stream(shared: Served) -> None:
    shared.worker.script.hang_after = 2
    with open_socket(shared.gateway) as raw:
        raw.sendall(chat_request(stream=True))
        received = raw.recv(65536)
        raw.sendall(b"no HTTP at all\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while data := raw.recv(65536):
                received += data
    assert b"invalid_http" not in received
    assert shared.worker.client_disconnected.wait(60)


def test_f09_a_slow_reader_is_not_disconnected(make_gateway, worker) -> None:
    words = ("x" * 60_000,) * 100
    worker.script.tokens = words
    with make_gateway(worker, write_timeout_s=3).stream() as response:
        received = b""
        for data in response.iter_raw():
            received += data
            time.sleep(0.001)
    assert received.startswith(b"".join(stream_events(words)[:-2]))


def test_a_request_over_its_timeout_returns_504_or_ends_its_stream_in_an_error_event(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    gateway = make_gateway(worker, **OFTEN, request_timeout_s=0.5)
    worker.script = Script(hang=True)
    assert status_and_code(gateway.chat()) == (504, "request_timeout")
    assert worker.client_disconnected.wait(60)
    worker.script = Script(hang_after=2)
    worker.client_disconnected.clear()
    assert stream_error_code(gateway.chat(stream=True).content) == "request_timeout"
    assert worker.client_disconnected.wait(60)


def test_an_upgrade_request_is_served_over_http_1_1(shared_gateway: RunningGateway) -> None:
    upgrade = chat_request(temperature=0).replace(
        b"host: localhost\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nHost: localhost\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nUpgrade: h2c\r\n",
    )
    head, end, body = upgrade.partition(b"\r\n\r\n")
    for packets in ((upgrade,), (head + end, body)):
        with open_socket(shared_gateway) as raw:
            for packet in packets:
                raw.sendall(packet)
            received = raw.recv(65536)
            assert received.startswith(b"HTTP/1.1 200 OK")
            assert b"one two three" in received
            raw.sendall(chat_request())
            assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_expect_100_continue_gets_100_continue(shared_gateway: RunningGateway) -> None:
    head, _, body = chat_request().partition(b"\r\n\r\n")
    with open_socket(shared_gateway) as raw:
        raw.sendall(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        raw.sendall(body)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200 OK")
