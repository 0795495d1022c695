"""A disconnected client frees its row at the real worker, in any state of its request."""

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.openai_requests import text_body
from tests.support.running_gateway import wait_until
from tests.support.served_engine import DemoGateway
from tests.support.worker_process import SUPPRESS_END_TOKENS

ENDLESS = {"temperature": 0, "max_tokens": 20_000, "logit_bias": SUPPRESS_END_TOKENS}


def rows_in_use(demo: DemoGateway) -> int:
    """Return the number of requests at the worker plus that at the gateway."""
    status = httpx.get(f"{demo.url}/v1/status", timeout=60).json()
    lanes = [lane for worker in status["workers"].values() for lane in worker["lanes"].values()]
    at_worker = sum(lane["running"] + lane["waiting"] for lane in lanes)
    return int(at_worker + status["gateway"]["requests_in_flight"])


@pytest.mark.parametrize(
    ("stream", "expected_part"),
    [(False, "the whole answer"), (True, "the first event"), (True, "the next event")],
)
def test_a_disconnected_client_frees_its_row(demo, stream, expected_part) -> None:
    body = json.dumps(text_body(demo.model, "Tell me a story.", stream=stream, **ENDLESS)).encode()
    address = urlsplit(demo.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as raw:
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        if expected_part == "the next event":
            assert b"data: " in raw.recv(65536)
        wait_until(lambda: rows_in_use(demo) == 2)
    wait_until(lambda: rows_in_use(demo) == 0)
    workers = httpx.get(f"{demo.url}/v1/status", timeout=60).json()["workers"].values()
    assert {worker["state"] for worker in workers} == {"ready"}, (
        "a disconnect is no failure of the worker"
    )
