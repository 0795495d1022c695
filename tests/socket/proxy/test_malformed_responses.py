"""Malformed worker responses: unusual but valid ones are relayed, invalid ones become errors."""

from __future__ import annotations

import json

import pytest

from tests.support.raw_client import stream_error_code, wait_for_outcomes
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import (
    DONE,
    Script,
    ScriptedWorker,
    chat_completion,
    chunk,
    stream_events,
    usage_chunk,
)

FIRST = chunk({"role": "assistant", "content": ""})
TEXT = chunk({"content": "wörd 🐎"})
STOP = chunk({}, "stop")
COMPLETE = (FIRST, TEXT, STOP, DONE)
HTML = b"<html><body>502 Bad Gateway nginx</body></html>"


def read_stream(gateway: RunningGateway) -> tuple[int, bytes]:
    with gateway.stream() as response:
        return response.status_code, response.read()


def crlf(events: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(event.replace(b"\n", b"\r\n") for event in events)


@pytest.mark.parametrize(
    "case",
    {
        "comments": (b": ping\n\n", FIRST, b": ping\n: ping\n\n", TEXT, STOP, DONE, b": bye\n\n"),
        "comment inside an event": (FIRST, b": x\n" + TEXT, STOP, DONE),
        "crlf": crlf(COMPLETE),
        "cr": tuple(event.replace(b"\n", b"\r") for event in COMPLETE),
        "crlf and lf": (*crlf(COMPLETE[:2]), *COMPLETE[2:]),
        "no space behind the colon": tuple(p.replace(b"data: ", b"data:") for p in COMPLETE),
        "data in several lines": (
            FIRST,
            TEXT.replace(b',"delta"', b',\ndata: "delta"'),
            STOP,
            DONE,
        ),
        "other fields": (FIRST, b"event: message\nid: 7\nretry: 10\n" + TEXT, STOP, DONE),
        "unknown field": (FIRST, b"colour: red\n" + TEXT, STOP, DONE),
        "blank lines": (b"\n\n", FIRST, b"\n\n\n", TEXT, STOP, b"\n", DONE),
        "all in one piece": (b"".join(COMPLETE),),
        "byte by byte": tuple(
            b"".join(COMPLETE)[i : i + 1] for i in range(len(b"".join(COMPLETE)))
        ),
        "cr and lf apart": tuple(
            event[i : i + 1] for event in crlf(COMPLETE) for i in range(len(event))
        ),
        "byte order mark": (b"\xef\xbb\xbf" + FIRST, TEXT, STOP, DONE),
        "two finish reasons": (FIRST, TEXT, STOP, STOP, DONE),
        "usage twice": (FIRST, TEXT, STOP, usage_chunk(), usage_chunk(), DONE),
        "nul in a string": (FIRST, chunk({"content": "a\x00b"}), STOP, DONE),
        "a long event": (FIRST, chunk({"content": "x" * 900_000}), STOP, DONE),
    }.items(),
    ids=lambda case: case[0].replace(" ", "_"),
)
def test_f15_unusual_but_valid_events_are_relayed(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    case: tuple[str, tuple[bytes, ...]],
) -> None:
    events = case[1]
    worker.script.events = events
    status, received = read_stream(gateway_with_worker)
    assert status == 200
    assert b"[DONE]" in received
    assert text_of(received) == text_of(b"".join(events))
    wait_for_outcomes(gateway_with_worker, completed=1)


@pytest.mark.parametrize(
    "case",
    {
        "no json": (FIRST, b"data: {oops\n\n", STOP, DONE),
        "no object": (FIRST, b"data: 7\n\n", STOP, DONE),
        "half an event": (FIRST, TEXT[:20]),
        "html": (FIRST, b"data: " + HTML + b"\n\n", STOP, DONE),
        "broken utf-8": (
            FIRST,
            TEXT.replace("ö".encode().hex().encode(), b"\xff"),
            b'data: "\xff"\n\n',
        ),
        "a line without end": (FIRST, b"data: " + b"x" * 3_000_000),
        "endless lines without an event": (FIRST, *[b"data: x\n" * 10_000] * 20),
        "an event of 10 MB": (FIRST, chunk({"content": "x" * 10_000_000}), STOP, DONE),
        "done at once": (FIRST, DONE),
    }.items(),
    ids=lambda case: case[0].replace(" ", "_"),
)
def test_f15_a_broken_event_ends_the_stream_in_an_error_event(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    case: tuple[str, tuple[bytes, ...]],
) -> None:
    worker.script.events = case[1]
    status, received = read_stream(gateway_with_worker)
    assert status == 200
    assert received.startswith(FIRST), "events before the error are relayed"
    codes = {"worker_failed", "worker_lost", "response_too_large"}
    assert stream_error_code(received) in codes
    wait_for_outcomes(gateway_with_worker, failed=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [HTML, b"", b"{}", b"[]", b"null", b'{"choices":[]}', b"{"])
def test_f16_a_200_without_a_valid_body_becomes_a_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, body: bytes, stream: bool
) -> None:
    worker.script = Script(body=body, headers=((b"x-note", b"html"),))
    response = gateway_with_worker.chat(stream=stream)
    assert response.status_code == 502
    assert response.json()["error"]["code"] in {"worker_failed", "worker_lost"}
    assert b"nginx" not in response.content
    wait_for_outcomes(gateway_with_worker, failed=1)


def test_f16_an_unstreamed_response_to_a_stream_request_becomes_a_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.body = json.dumps(chat_completion("all at once")).encode()
    status, _ = read_stream(gateway_with_worker)
    assert status == 502


def test_f18_an_error_with_status_200_becomes_a_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.body = b'{"error": {"message": "/Users/me/model exploded"}}'
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")
    assert b"exploded" not in response.content


def test_f21_a_404_of_a_worker_becomes_a_502_without_its_message(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    body = b'{"error": "[Errno 2] No such file: /Users/me/models/demo"}'
    worker.script = Script(status=404, body=body)
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")
    assert b"/Users" not in response.content


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b'{"error": {"message": "Traceback", "type": "x"}}'),
        (401, b'{"error": {"message": "wrong token", "type": "x"}}'),
        (404, b'{"error": {"message": "no such model", "type": "x"}}'),
        (400, b"<html>bad</html>"),
        (400, b'{"detail": "bad"}'),
        (307, b""),
        (200, b"<html>proxy</html>"),
        (200, b"[]"),
    ],
)
def test_f21_an_unexpected_worker_response_becomes_a_502_with_a_fixed_message(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, status: int, body: bytes
) -> None:
    worker.script = Script(status=status, body=body)
    response = gateway_with_worker.chat()
    assert response.status_code == 502
    assert response.json()["error"] == {
        "message": "The worker failed to process this request.",
        "type": "server_error",
        "param": None,
        "code": "worker_failed",
    }


def test_f21_a_400_in_openais_error_format_is_relayed(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(
        status=400,
        body=b'{"error": {"message": "Too long.", "type": "invalid_request_error",'
        b' "param": "messages", "code": "context_length_exceeded"}}',
    )
    response = gateway_with_worker.chat()
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_l11_text_that_is_no_utf_8_ends_the_stream_in_an_error_event(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, pause_s: float
) -> None:
    broken = chunk({"content": "a-b"}).replace(b"a-b", b"a\xffb")
    worker.script.pause_s = pause_s
    worker.script.events = (FIRST, TEXT, TEXT, broken, TEXT, STOP, DONE)
    status, received = read_stream(gateway_with_worker)
    assert status == 200
    assert b"\xff" not in received
    assert stream_error_code(received) == "worker_failed"


def test_l11_an_answer_with_nan_is_a_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    body = json.dumps({**chat_completion("here"), "score": float("nan")}).encode()
    worker.script = Script(status=200, body=body)
    response = gateway_with_worker.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "worker_failed")


def test_f57_an_http_1_0_worker_is_relayed(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script.http_1_0 = True
    for _ in range(3):
        status, received = read_stream(gateway_with_worker)
        assert (status, received[-len(DONE) :]) == (200, DONE)
        assert gateway_with_worker.chat().status_code == 200


@pytest.mark.parametrize(
    "informational", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\n\r\n"]
)
def test_f57_informational_responses_are_skipped(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, informational: bytes
) -> None:
    body = json.dumps(chat_completion("here")).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    worker.script.raw = informational + head % len(body) + body
    response = gateway_with_worker.chat()
    assert response.json()["choices"][0]["message"]["content"] == "here"


def test_f57_trailers_do_not_reach_the_client(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    events = b"".join(stream_events(("one",)))
    worker.script.raw = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        b"trailer: x-secret\r\n\r\n%x\r\n%b\r\n0\r\nx-secret: 1\r\n\r\n" % (len(events), events)
    )
    with gateway_with_worker.stream() as response:
        assert response.read().endswith(DONE)
    assert "x-secret" not in response.headers


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 banana\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnothex\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-long: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    ],
    ids="nothing ssh no_status bad_length two_lengths bad_chunk long_header upgrade".split(),
)
@pytest.mark.parametrize("stream", [False, True])
def test_f57_invalid_http_becomes_a_502(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, raw: bytes, stream: bool
) -> None:
    worker.script.raw = raw
    response = gateway_with_worker.chat(stream=stream)
    assert response.status_code == 502
    assert response.json()["error"]["code"] in {"worker_failed", "worker_lost"}
    wait_for_outcomes(gateway_with_worker, failed=1)


def text_of(stream: bytes) -> str:
    """Parse an event stream by the WHATWG rules and return its text."""
    text = ""
    normalized = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for event in normalized.split(b"\n\n"):
        values = [
            line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"
        ]
        if values and values != [b"[DONE]"]:
            for choice in json.loads(b"\n".join(values))["choices"]:
                text += choice["delta"].get("content", "")
    return text
