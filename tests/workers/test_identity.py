"""Workers have stable names of their own, and addresses that others reach."""

from __future__ import annotations

import pytest

from workers.protocol import WorkerReport
from workers.server.settings import advertised_url, default_worker_id, is_loopback


@pytest.mark.parametrize(
    ("hostname", "expected"),
    [
        ("studio.local", "studio-9200"),
        ("Anna~s Mac Studio.fritz.box", "Anna-s-Mac-Studio-9200"),
        ("", "worker-9200"),
        ("x" * 80, "x" * 50 + "-9200"),
    ],
)
def test_default_name_is_machine_and_port_in_plain_letters(hostname: str, expected: str) -> None:
    worker_id = default_worker_id(hostname, 9200)
    assert worker_id == expected
    WorkerReport(worker_id=worker_id, boot_id="b", url="u", model="m", context_tokens=1, lanes=())


def test_two_workers_of_one_machine_differ() -> None:
    assert default_worker_id("studio", 9200) != default_worker_id("studio", 9201)


def test_address_is_the_one_that_faces_the_gateway_when_all_are_listened_on() -> None:
    assert advertised_url("0.0.0.0", 9200, "http://127.0.0.1:8000") == "http://127.0.0.1:9200"
    assert advertised_url("192.0.2.7", 9200, "http://192.0.2.1:80") == "http://192.0.2.7:9200"
    assert advertised_url("fd00::7", 9200, None) == "http://[fd00::7]:9200"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("localhost.evil", False),
        ("192.168.1.2", False),
    ],
)
def test_loopback_is_known_from_the_rest(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
