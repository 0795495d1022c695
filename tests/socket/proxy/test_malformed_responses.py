"""Malformed worker responses: unusual but valid ones are relayed, invalid ones become errors."""

import json

import pytest

from tests.support.gateway_fixtures import Served
from tests.support.raw_client import stream_error_code, wait_for_outcomes
from tests.support.running_gateway import RunningGateway, said, status_and_code
from tests.support.scripted_worker import (
    DONE,
    Script,
    ScriptedWorker,
    chat_completion,
    chunk,
    event,
    stream_events,
    usage_chunk,
)

FIRST = chunk({"role": "assistant", "content": ""})
TEXT = chunk({"content": "wörd 🐎"})
STOP = chunk({}, "stop")
COMPLETE = (FIRST, TEXT, STOP, DONE)
CRLF = tuple(event.replace(b"\n", b"\r\n") for event in COMPLETE)
HTML = b"<html><body>502 Bad Gateway nginx</body></html>"
FAILED = {(502, "worker_failed"), (502, "worker_lost")}


def letters(events: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(bytes([letter]) for event in events for letter in event)


UNUSUAL = {
    "comments": (b": ping\n\n", FIRST, b": ping\n: ping\n\n", TEXT, STOP, DONE, b": bye\n\n"),
    "comment inside an event": (FIRST, b": x\n" + TEXT, STOP, DONE),
    "crlf": CRLF,
    "cr": tuple(event.replace(b"\n", b"\r") for event in COMPLETE),
    "crlf and lf": (*CRLF[:2], *COMPLETE[2:]),
    "no space behind the colon": tuple(p.replace(b"data: ", b"data:") for p in COMPLETE),
    "data in several lines": (FIRST, TEXT.replace(b',"delta"', b',\ndata: "delta"'), STOP, DONE),
    "other fields": (FIRST, b"event: message\nid: 7\nretry: 10\n" + TEXT, STOP, DONE),
    "unknown field": (FIRST, b"colour: red\n" + TEXT, STOP, DONE),
    "blank lines": (b"\n\n", FIRST, b"\n\n\n", TEXT, STOP, b"\n", DONE),
    "all in one piece": (b"".join(COMPLETE),),
    "byte by byte": letters(COMPLETE),
    "cr and lf apart": letters(CRLF),
    "byte order mark": (b"\xef\xbb\xbf" + FIRST, TEXT, STOP, DONE),
    "two finish reasons": (FIRST, TEXT, STOP, STOP, DONE),
    "usage twice": (FIRST, TEXT, STOP, usage_chunk(), usage_chunk(), DONE),
    "nul in a string": (FIRST, chunk({"content": "a\x00b"}), STOP, DONE),
    "a long event": (FIRST, chunk({"content": "x" * 900_000}), STOP, DONE),
}


def test_f15_unusual_but_valid_events_are_relayed(served: Served) -> None:
    for name, events in UNUSUAL.items():
        served.worker.script.events = events
        response = served.gateway.chat(stream=True)
        assert response.status_code == 200, name
        assert b"[DONE]" in response.content, name
        assert text_of(response.content) == text_of(b"".join(events)), name
    wait_for_outcomes(served.gateway, completed=len(UNUSUAL))


def text_of(stream: bytes) -> str:
    """Parse an event stream by the WHATWG rules and return its text."""
    text = ""
    normalized = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for one in normalized.split(b"\n\n"):
        values = [line[5:].removeprefix(b" ") for line in one.split(b"\n") if line[:5] == b"data:"]
        if values and values != [b"[DONE]"]:
            for choice in json.loads(b"\n".join(values))["choices"]:
                text += choice["delta"].get("content", "")
    return text


BROKEN = {
    "no json": (FIRST, b"data: {oops\n\n", STOP, DONE),
    "no object": (FIRST, b"data: 7\n\n", STOP, DONE),
    "half an event": (FIRST, TEXT[:20]),
    "html": (FIRST, b"data: " + HTML + b"\n\n", STOP, DONE),
    "broken utf-8": (FIRST, b'data: "\xff"\n\n'),
    "a line without end": (FIRST, b"data: " + b"x" * 2_000_000),
    "endless lines without an event": (FIRST, *[b"data: x\n" * 10_000] * 20),
    "an event of 2 MB": (FIRST, chunk({"content": "x" * 2_000_000}), STOP, DONE),
    "done at once": (FIRST, DONE),
}
CODES = {
    "half an event": "worker_lost",
    "a line without end": "response_too_large",
    "endless lines without an event": "response_too_large",
    "an event of 2 MB": "response_too_large",
}


def test_f15_a_broken_event_ends_the_stream_in_an_error_event(gateway, worker) -> None:
    for name, events in BROKEN.items():
        worker.script.events = events
        gateway.rejoin(worker)
        response = gateway.chat(stream=True, **said(name))
        assert response.status_code == 200, name
        assert response.content.startswith(FIRST), "events before the error are relayed"
        code = CODES.get(name, "worker_failed")
        assert stream_error_code(response.content) == code, name
    wait_for_outcomes(gateway, failed=len(BROKEN))


@pytest.mark.parametrize("stream", [False, True])
def test_f16_f18_a_200_without_a_valid_body_becomes_a_502(gateway, worker, stream) -> None:
    bodies = [HTML, b"", b"{}", b"[]", b"null", b'{"choices":[]}', b"{"]
    bodies += [b'{"error": {"message": "/Users/me/nginx exploded"}}']
    bodies += [json.dumps(chat_completion("all at once")).encode()] * stream
    for number, body in enumerate(bodies):
        worker.script = Script(body=body, headers=((b"x-note", b"html"),))
        gateway.rejoin(worker)
        response = gateway.chat(stream=stream, **said(f"Hello {number}"))
        assert status_and_code(response) in FAILED, body
        assert b"nginx" not in response.content
    wait_for_outcomes(gateway, failed=len(bodies))


def test_f21_an_unexpected_worker_response_becomes_a_502_with_a_fixed_message(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    for status, body in (
        (500, b'{"error": {"message": "Traceback", "type": "x"}}'),
        (401, b'{"error": {"message": "wrong token", "type": "x"}}'),
        (404, b'{"error": {"message": "no such model", "type": "x"}}'),
        (404, b'{"error": "[Errno 2] No such file: /Users/me/models/demo"}'),
        (400, b"<html>bad</html>"),
        (400, b'{"detail": "bad"}'),
        (307, b""),
        (200, b"<html>proxy</html>"),
        (200, b"[]"),
        (200, json.dumps({**chat_completion("l11"), "score": float("nan")}).encode()),
    ):
        worker.script = Script(status=status, body=body)
        gateway.rejoin(worker)
        response = gateway.chat()
        assert response.status_code == 502, body
        assert response.json()["error"] == {
            "message": "The worker failed to process this request.",
            "type": "server_error",
            "param": None,
            "code": "worker_failed",
        }


def test_f21_a_400_in_openais_error_format_is_relayed(served: Served) -> None:
    error = {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    served.worker.script = Script(status=400, body=json.dumps({"error": error}).encode())
    response = served.gateway.chat()
    assert (response.status_code, response.json()["error"]) == (400, error)


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
def test_l11_text_that_is_no_utf_8_ends_the_stream_in_an_error_event(served, pause_s) -> None:
    broken = chunk({"content": "a-b"}).replace(b"a-b", b"a\xffb")
    served.worker.script.pause_s = pause_s
    served.worker.script.events = (FIRST, TEXT, TEXT, broken, TEXT, STOP, DONE)
    response = served.gateway.chat(stream=True)
    assert response.status_code == 200
    assert b"\xff" not in response.content
    assert stream_error_code(response.content) == "worker_failed"


def test_f57_an_http_1_0_worker_is_relayed(served: Served) -> None:
    served.worker.script.http_1_0 = True
    for _ in range(3):
        response = served.gateway.chat(stream=True)
        assert (response.status_code, response.content[-len(DONE) :]) == (200, DONE)
        assert served.gateway.chat().status_code == 200


def test_f57_trailers_do_not_reach_the_client(served: Served) -> None:
    events = b"".join(stream_events(("one",)))
    served.worker.script.raw = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        b"trailer: x-secret\r\n\r\n%x\r\n%b\r\n0\r\nx-secret: 1\r\n\r\n" % (len(events), events)
    )
    response = served.gateway.chat(stream=True)
    assert response.content.endswith(DONE)
    assert "x-secret" not in response.headers


INVALID_HTTP = (
    b"",
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/1.1 banana\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: ten\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnothex\r\n{}\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"x-long: " + b"x" * 200_000 + b"\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
)


@pytest.mark.parametrize("stream", [False, True])
def test_f57_invalid_http_becomes_a_502(gateway, worker, stream) -> None:
    for number, raw in enumerate(INVALID_HTTP):
        worker.script.raw = raw
        gateway.rejoin(worker)
        response = gateway.chat(stream=stream, **said(f"Hello {number}"))
        assert status_and_code(response) in FAILED, raw[:80]
    wait_for_outcomes(gateway, failed=len(INVALID_HTTP))


INVALID_USAGE = (
    None,
    {"prompt_tokens": -7, "completion_tokens": -3},
    {"prompt_tokens": "many", "completion_tokens": True},
    [1, 2],
    {"prompt_tokens": 1.5, "completion_tokens": 2.5},
)


def test_f53_missing_or_invalid_usage_fails_no_response_and_no_sum(served: Served) -> None:
    *events, _, done = stream_events(("one",))
    for usage in INVALID_USAGE:
        trailing = [event({"choices": [], "usage": usage})] if usage else []
        body = json.dumps(chat_completion("one") | {"usage": usage}).encode()
        served.worker.script = Script(events=(*events, *trailing, done))
        assert served.gateway.chat(stream=True).content.endswith(DONE)
        served.worker.script = Script(body=body)
        assert served.gateway.chat().status_code == 200
    wait_for_outcomes(served.gateway, completed=2 * len(INVALID_USAGE))
    tokens = served.gateway.status()["models"]["demo"]["tokens"]
    assert all(count >= 0 for count in tokens.values())
