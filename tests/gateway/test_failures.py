"""Workers that refuse, break, hang or lie, and clients that leave."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.gateway.fake_worker import DONE, FakeWorker, Script, chunk, event, stream_events
from tests.gateway.serving import Gateway, eventually, serving, settings_for_tests


def in_flight(gateway: Gateway) -> int:
    status = gateway.status()
    count: int = status["gateway"]["requests_in_flight"]
    for one in status["workers"].values():
        count += sum(lane["in_flight"] for lane in one["lanes"].values())
    return count


def error_event(received: bytes) -> str:
    """The code of the error that ends a stream."""
    *_, last, rest = received.split(b"\n\n")
    assert rest == b""
    frame = httpx.Response(200, content=last.removeprefix(b"data: ")).json()
    return str(frame["error"]["code"])


def test_a_refused_connection_goes_to_the_next_worker(
    gateway: Gateway, second_worker: FakeWorker
) -> None:
    gone = FakeWorker(worker_id="gone")
    gateway.join(gone)
    gone.socket.close()
    gateway.join(second_worker)
    answers = [gateway.chat() for _ in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-paceline-worker"] for answer in answers} == {"fake-b"}
    attempts = [answer.headers["x-paceline-attempts"] for answer in answers]
    assert attempts.count("2") <= 3, "a worker that refused three times is ejected"
    assert gateway.status()["retries"] == attempts.count("2")


def test_the_last_worker_is_asked_however_often_it_refused(
    gateway: Gateway, worker: FakeWorker
) -> None:
    gone = FakeWorker(worker_id=worker.worker_id)
    gone.socket.close()
    gateway.join(gone)
    codes = {gateway.chat().json()["error"]["code"] for _ in range(8)}
    assert codes == {"worker_unreachable"}
    assert gateway.status()["workers"]["fake-a"]["state"] == "ready"


def test_a_worker_that_is_busy_is_passed_over_and_the_last_word_is_retry_after(
    line: Gateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    worker.script = Script(status=429, headers=((b"retry-after", b"9"),))
    answer = line.chat()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "9")
    assert answer.json()["error"]["code"] == "workers_busy"
    line.join(second_worker)
    assert {line.chat().headers["x-paceline-worker"] for _ in range(4)} == {"fake-b"}


def test_stream_cut_by_worker_ends_in_error_event_without_done(
    line: Gateway, worker: FakeWorker
) -> None:
    worker.script.cut_after = 2
    with line.stream() as answer:
        received = answer.read()
    assert answer.status_code == 200
    assert received.startswith(stream_events(())[0] + chunk({"content": "one"}))
    assert error_event(received) == "worker_lost"
    assert b"[DONE]" not in received
    assert in_flight(line) == 0


@pytest.mark.parametrize("events", range(1, 6))
def test_a_clean_end_without_finish_and_done_is_an_error_too(
    line: Gateway, worker: FakeWorker, events: int
) -> None:
    worker.script.end_after = events
    with line.stream() as answer:
        received = answer.read()
    assert error_event(received) == "worker_lost"
    assert b"[DONE]" not in received


def test_a_stream_lost_before_its_first_event_is_a_plain_502(
    line: Gateway, worker: FakeWorker
) -> None:
    worker.script.cut_after = 0
    with line.stream() as answer:
        answer.read()
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "worker_lost"


def test_done_without_a_finish_reason_is_not_passed_on(line: Gateway, worker: FakeWorker) -> None:
    worker.script.events = (chunk({"content": "half"}), DONE)
    with line.stream() as answer:
        received = answer.read()
    assert error_event(received) == "worker_failed"
    assert b"[DONE]" not in received


def test_an_error_event_of_the_worker_becomes_ours_without_its_text(
    line: Gateway, worker: FakeWorker
) -> None:
    told = event({"error": {"message": "/Users/me/model exploded at 0x7f", "code": "x"}})
    worker.script.events = (chunk({"content": "half"}), told, DONE)
    with line.stream() as answer:
        received = answer.read()
    assert error_event(received) == "worker_failed"
    assert b"exploded" not in received
    assert b"[DONE]" not in received


def test_a_worker_lost_over_a_whole_answer_is_a_502_and_not_tried_elsewhere(
    gateway: Gateway,
) -> None:
    rude = FakeWorker()
    gateway.join(rude)

    def hang_up() -> None:
        connection, _ = rude.socket.accept()
        connection.recv(65536)
        connection.close()

    with rude.socket, ThreadPoolExecutor(1) as aside:
        aside.submit(hang_up)
        answer = gateway.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
    assert answer.headers["x-paceline-attempts"] == "1"


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
def test_nonsense_of_a_worker_is_a_502_in_our_words(
    line: Gateway, worker: FakeWorker, status: int, body: bytes
) -> None:
    worker.script = Script(status=status, body=body)
    answer = line.chat()
    assert answer.status_code == 502
    assert answer.json()["error"] == {
        "message": "The worker failed on this request.",
        "type": "server_error",
        "param": None,
        "code": "worker_failed",
    }


def test_a_400_of_the_worker_in_openais_shape_is_relayed(line: Gateway, worker: FakeWorker) -> None:
    worker.script = Script(
        status=400,
        body=b'{"error": {"message": "Too long.", "type": "invalid_request_error",'
        b' "param": "messages", "code": "context_length_exceeded"}}',
    )
    answer = line.chat()
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "Too long.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_says_nothing_is_a_504(
    tmp_path: Path, worker: FakeWorker, stream: bool
) -> None:
    worker.script.hang = True
    with Gateway(settings_for_tests(tmp_path, answer_timeout_s=0.1)) as gateway:
        gateway.join(worker)
        answer = gateway.chat(stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "worker_silent")
        assert worker.client_left.wait(10), "the worker was told that nobody waits any more"


def test_a_stream_that_pauses_too_long_ends_in_an_error_event(
    tmp_path: Path, worker: FakeWorker
) -> None:
    worker.script.hang_after = 2
    with Gateway(settings_for_tests(tmp_path, idle_timeout_s=0.1)) as gateway:
        gateway.join(worker)
        with gateway.stream() as answer:
            received = answer.read()
        assert error_event(received) == "worker_stalled"
        assert worker.client_left.wait(10)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_answer_frees_the_worker(
    line: Gateway, worker: FakeWorker, stream: bool
) -> None:
    worker.script.hang = True
    leave_after(worker, line, stream=stream)
    assert worker.client_left.wait(10)
    eventually(lambda: in_flight(line) == 0)
    assert line.status()["outcomes"] == {"client_left": 1}


def leave_after(worker: FakeWorker, line: Gateway, *, stream: bool) -> None:
    """Send a request and close the connection once the worker has it."""
    body = b'{"model":"demo","messages":[{"role":"user","content":"x"}],"stream":%s}' % (
        b"true" if stream else b"false"
    )
    with socket.create_connection(("127.0.0.1", int(line.url.rpartition(":")[2]))) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert worker.hearing.wait(10)


def test_a_client_that_stops_reading_is_cut_off_and_blames_nobody(
    tmp_path: Path, worker: FakeWorker
) -> None:
    worker.script.events = (chunk({"content": "x" * 60_000}),) * 2_000
    with Gateway(settings_for_tests(tmp_path, write_timeout_s=0.2)) as gateway:
        gateway.join(worker)
        with gateway.stream():
            assert worker.client_left.wait(20)
            eventually(lambda: in_flight(gateway) == 0)
            assert gateway.status()["outcomes"] == {"client_left": 1}


def test_a_client_that_leaves_mid_stream_frees_the_worker_and_blames_nobody(
    line: Gateway, worker: FakeWorker
) -> None:
    worker.script.hang_after = 3
    with line.stream() as answer:
        next(answer.iter_raw())
    assert worker.client_left.wait(10)
    eventually(lambda: in_flight(line) == 0)
    status = line.status()
    assert status["outcomes"] == {"client_left": 1}
    assert status["workers"]["fake-a"]["state"] == "ready"


def test_a_worker_that_dies_after_done_has_still_answered(
    line: Gateway, worker: FakeWorker
) -> None:
    worker.script.cut_after = len(stream_events(worker.script.words))
    with line.stream() as answer:
        received = answer.read()
    assert received.endswith(DONE)
    assert line.status()["outcomes"] == {"completed": 1}


def test_a_worker_killed_and_replaced_takes_requests_again(
    gateway: Gateway, worker: FakeWorker
) -> None:
    first = FakeWorker(worker_id="fake-a", boot_id="boot-0")
    with serving(first, sockets=[first.socket]):
        gateway.join(first)
        assert gateway.chat().status_code == 200
    assert gateway.chat().status_code == 503
    assert gateway.join(worker).status_code == 409, "the id is held until the old boot is silent"


def test_a_worker_that_does_not_end_its_stream_behind_done_is_not_waited_for(
    line: Gateway, worker: FakeWorker
) -> None:
    worker.script.hang_after = len(stream_events(worker.script.words))
    with line.stream() as answer:
        received = answer.read()
    assert received.endswith(DONE)
    assert worker.client_left.wait(10)
    assert line.status()["outcomes"] == {"completed": 1}
