"""Before it loads anything, a worker asks its gateway whether it may join."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState

from gateway.fleet.worker import HEARTBEAT_TIMEOUT_S
from paceline.protocol import PROTOCOL, ExitCode
from tests.support.fault_proxy import running_proxy
from tests.support.http_server import Request, ServerConnection
from tests.support.running_gateway import RunningGateway, running_server
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.worker_process import run_worker
from workers.heartbeat import (
    LONGEST_RETRY_S,
    HeartbeatRejected,
    NotAdmitted,
    PairingEnded,
    _next_attempt_s,
    wait_for_gateway,
)

TOKEN = SecretStr(JOIN_TOKEN)
URL = "http://192.0.2.7:9200"
ASKED = "/admin/v1/workers/studio/protocol?url=http%3A%2F%2F192.0.2.7%3A9200"


@contextmanager
def server_that_returns(*responses: tuple[int, bytes]) -> Iterator[str]:
    """Serve these statuses and bodies one after another, the last one again and again."""
    left = list(responses)

    async def answer(connection: ServerConnection, request: Request) -> None:
        assert (request.method, request.path) == ("GET", ASKED)
        status, body = left.pop(0) if len(left) > 1 else left[0]
        await connection.send_head(status, (), length=len(body))
        await connection.send_body(body)

    listener = socket.create_server(("127.0.0.1", 0))
    with running_server(answer, sockets=[listener]):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def protocol(number: int) -> tuple[int, bytes]:
    return 200, json.dumps({"protocol": number}).encode()


def never(_seconds: float) -> None:
    raise AssertionError("there is nothing to wait for")


def test_a_worker_with_the_join_token_is_admitted(gateway: RunningGateway) -> None:
    wait_for_gateway(gateway.url, TOKEN, "studio", URL, never)


@pytest.mark.parametrize(
    ("token", "problem"),
    [(SecretStr("wrong"), "has another join token"), (None, "needs its join token")],
)
def test_a_wrong_or_missing_token_is_told_apart(gateway, token, problem) -> None:
    with pytest.raises(NotAdmitted, match=problem) as refused:
        wait_for_gateway(gateway.url, token, "studio", URL, never)
    assert "wrong" not in str(refused.value)


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_gateway_one_step_older_or_newer_admits_the_worker(step: int) -> None:
    with server_that_returns(protocol(PROTOCOL + step)) as url:
        wait_for_gateway(url, TOKEN, "studio", URL, never)


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (protocol(PROTOCOL + 2), f"protocol {PROTOCOL + 2} .* Update this worker"),
        ((200, b"<html>"), "another program"),
        ((404, b""), "status 404. Check --join"),
        ((308, b""), "status 308. Check --join"),
        ((421, b'{"error": {"message": "No name of this gateway."}}'), "No name of this gateway."),
    ],
)
def test_what_no_wait_would_change_ends_in_one_sentence(response, problem) -> None:
    with server_that_returns(response) as url, pytest.raises(NotAdmitted, match=problem):
        wait_for_gateway(url, TOKEN, "studio", URL, never)


def test_a_gateway_that_cannot_be_reached_is_waited_for_and_named_once(gateway, caplog) -> None:
    with running_proxy(gateway.url) as proxy:
        proxy.refuse()
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                proxy.listen()

        wait_for_gateway(proxy.url, TOKEN, "studio", URL, pause)
        assert len(pauses) == 3
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.name for record in warnings] == ["workers.heartbeat"]
    assert f"{proxy.url}: Connection refused" in warnings[0].getMessage()


def test_a_gateway_that_shuts_down_or_is_full_is_waited_for() -> None:
    pauses: list[float] = []
    with server_that_returns((503, b""), (429, b""), (502, b"<html>"), protocol(PROTOCOL)) as url:
        wait_for_gateway(url, TOKEN, "studio", URL, pauses.append)
    assert len(pauses) == 3


def test_an_id_of_a_worker_that_lives_is_refused_and_one_that_has_left_leaves_it_free(
    gateway, worker, second_worker
) -> None:
    gateway.join_with(worker)
    pauses: list[float] = []

    def ask(url: str) -> None:
        wait_for_gateway(gateway.url, TOKEN, worker.worker_id, url, pauses.append)

    ask(worker.url)
    assert not pauses, "it was started again at its address"
    with pytest.raises(NotAdmitted, match=r"another worker uses this id; start .* another --id"):
        ask(second_worker.url)
    assert sum(pauses) > HEARTBEAT_TIMEOUT_S
    pauses.clear()
    gateway.remove_worker(worker)
    ask(second_worker.url)
    assert not pauses


def test_a_worker_process_that_is_not_admitted_ends_before_it_loads_its_model(gateway) -> None:
    ended = run_worker("--model", "owner/none", "--port", "0", "--join", gateway.url)
    assert ended.returncode == ExitCode.NOT_ADMITTED
    assert ended.stderr.startswith(f"paceline worker: The gateway at {gateway.url} ")
    assert ended.stderr.count("\n") == 1


def test_a_worker_whose_pairing_has_ended_tries_again_once_a_minute() -> None:
    state = RetryCallState(AsyncRetrying(), None, (), {})
    for error, least_s, most_s in (
        (PairingEnded("ended"), 60.0, 60.0),
        (HeartbeatRejected("other"), 0.0, LONGEST_RETRY_S),
    ):
        state.set_exception((type(error), error, None))
        assert least_s <= _next_attempt_s(state) <= most_s
