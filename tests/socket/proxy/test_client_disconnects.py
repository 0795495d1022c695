"""Clients that disconnect or half-close at every stage: the gateway frees the worker and ejects
none."""

import json
from collections.abc import Callable

import pytest

from tests.support.gateway_fixtures import MakeGateway, Served
from tests.support.log_capture import LogCapture
from tests.support.raw_client import (
    RawClient,
    in_flight,
    raw_client,
    request_bytes,
    wait_for_outcomes,
)
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, chunk, stream_events

DISCONNECTS = {"close": RawClient.close, "reset": RawClient.reset}


@pytest.fixture(params=DISCONNECTS)
def disconnect(request: pytest.FixtureRequest) -> Callable[[RawClient], None]:
    return DISCONNECTS[request.param]


def test_f07_a_disconnect_during_a_stream_frees_the_worker_and_ejects_none(
    served: Served, disconnect: Callable[[RawClient], None]
) -> None:
    sent = stream_events(served.worker.script.tokens)
    for events in range(1, 6):
        served.worker.script.hang_after = events
        with raw_client(served.gateway) as client:
            client.send_chat(stream=True)
            client.read_until(sent[events - 1].strip())
            disconnect(client)
            wait_until(lambda: served.worker.in_flight == 0)
    wait_for_outcomes(served.gateway, client_left=5)
    assert served.gateway.status()["workers"]["fake-a"]["state"] == "ready"
    served.worker.script = Script()
    assert served.gateway.chat().status_code == 200


def test_f08_a_disconnect_before_the_first_event_frees_the_worker(served, disconnect) -> None:
    head_alone = Script(events=(b'{"choices": [',), hang_after=1)
    asked = ((False, Script(hang=True)), (True, Script(hang=True)), (True, head_alone))
    for stream, script in asked:
        served.worker.script = script
        served.worker.request_received.clear()
        with raw_client(served.gateway) as client:
            client.send_chat(stream=stream)
            assert served.worker.request_received.wait(60)
            disconnect(client)
            wait_until(lambda: served.worker.in_flight == 0)
    wait_for_outcomes(served.gateway, client_left=len(asked))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_f08_a_disconnect_is_seen_behind_a_body_of_any_size(served, disconnect, path) -> None:
    """Behind a large one the gateway has paused while it read."""
    sizes = (1, 70_000, 3_000_000)
    for chars in sizes:
        served.worker.script = Script(hang=True)
        served.worker.request_received.clear()
        prompt = "input" if path == "/v1/responses" else "messages"
        message = {"role": "user", "content": "x" * chars}
        limit = {"max_tokens": 5} if path == "/v1/messages" else {}
        body = {"model": "demo", prompt: [message], **limit}
        with raw_client(served.gateway) as client:
            client.send(request_bytes(json.dumps(body).encode(), path=path))
            assert served.worker.request_received.wait(60)
            disconnect(client)
            wait_until(lambda: served.worker.in_flight == 0)
    wait_for_outcomes(served.gateway, client_left=len(sizes))


def test_f08_a_disconnect_within_the_request_reaches_no_worker(served, disconnect) -> None:
    request = request_bytes(b'{"model":"demo","messages":[{"role":"user","content":"x"}]}')
    for fraction in (0.0, 0.3, 0.99):
        with raw_client(served.gateway) as client:
            client.send(request[: int(len(request) * fraction)])
            disconnect(client)
        wait_until(lambda: in_flight(served.gateway) == 0)
    assert served.gateway.chat().status_code == 200
    assert len(served.worker.requests) == 1


def test_f09_a_stalled_reader_is_disconnected_and_a_concurrent_stream_completes(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    gateway = make_gateway(worker, check_s=0.1, write_timeout_s=0.3)
    worker.scripts_by_message["flood"] = Script(events=(chunk({"content": "x" * 60_000}),) * 2_000)
    worker.script = Script(tokens=("word ",) * 40, pause_s=0.02)
    with raw_client(gateway) as stalled, gateway.stream() as concurrent:
        stalled.send_chat(stream=True, messages=[{"role": "user", "content": "flood"}])
        received = concurrent.read()
        assert received.count(b"word ") == 40
        assert received.endswith(DONE)
        wait_until(lambda: worker.in_flight == 0)
    wait_for_outcomes(gateway, client_left=1, completed=1)


def test_f12_a_half_close_after_the_request_counts_as_a_disconnect(served: Served) -> None:
    served.worker.script.hang = True
    with raw_client(served.gateway) as client:
        client.send_chat()
        assert served.worker.request_received.wait(60)
        client.half_close()
        wait_until(lambda: served.worker.in_flight == 0)
        assert client.read_to_end() == b""
    wait_for_outcomes(served.gateway, client_left=1)


@pytest.mark.parametrize("path", ["/v1/route/explain", "/admin/v1/keys"])
def test_c19_a_disconnect_during_the_body_of_another_route_is_no_error(
    gateway_with_worker: RunningGateway, log_capture: LogCapture, path: str
) -> None:
    with raw_client(gateway_with_worker) as client:
        secret = gateway_with_worker.admin_key
        request = request_bytes(b"{" + b" " * 1000, path=path, secret=secret)[:-500]
        client.send(request.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n"))
        client.read_until(b"100 Continue")  # the gateway reads the body
        client.reset()
    wait_until(lambda: in_flight(gateway_with_worker) == 0)
    assert not [text for text in log_capture.texts if "Traceback" in text]
