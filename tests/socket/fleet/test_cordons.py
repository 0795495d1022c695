"""Cordons: a worker that an admin takes out gets nothing new, and loses nothing that it has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from pydantic import SecretStr

from gateway.errors import StartupError
from gateway.server import Ending, serve
from tests.support.running_gateway import RunningGateway, error_of, eventually, settings_for_tests
from tests.support.scripted_worker import FakeWorker, Script

PATH = "/admin/v1/workers"


def workers(gateway: RunningGateway) -> dict[str, dict[str, Any]]:
    listed = gateway.admin.get(PATH).json()["workers"]
    return {worker["worker_id"]: worker for worker in listed}


def cordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.put(f"{PATH}/{name}/cordon")


def uncordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.delete(f"{PATH}/{name}/cordon")


def heard(gateway: RunningGateway, *fakes: FakeWorker) -> list[int]:
    """Send six requests and count who got how many."""
    before = [len(fake.heard) for fake in fakes]
    assert [gateway.chat().status_code for _ in range(6)] == [200] * 6
    return [len(fake.heard) - was for fake, was in zip(fakes, before, strict=True)]


def test_a_cordoned_worker_gets_no_request_until_that_is_lifted(
    line: RunningGateway, worker: FakeWorker, second_worker: FakeWorker
) -> None:
    line.join(second_worker)
    told = cordon(line)
    assert told.status_code == 200
    assert (told.json()["state"], told.json()["in_flight"]) == ("cordoned", 0)
    assert "cordoned_since" in told.json()
    assert heard(line, worker, second_worker) == [0, 6]
    assert line.status()["workers"]["fake-a"]["state"] == "cordoned"
    assert uncordon(line).status_code == 204
    assert "cordoned_since" not in workers(line)["fake-a"]
    eventually(lambda: heard(line, worker, second_worker)[0] > 0)


def test_a_cordon_tells_since_when_and_by_whom(tmp_path: Path, worker: FakeWorker) -> None:
    settings = settings_for_tests(tmp_path)
    keyed = settings.model_copy(update={"admin_key": SecretStr("admin-key")})
    said = {"x-paceline-author": quote("Jörg")}
    with RunningGateway(settings) as gateway:
        gateway.join(worker)
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "loopback"
        gateway.admin.put(f"{PATH}/fake-a/cordon", headers=said)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "loopback", "the first one counts"
        uncordon(gateway)
        gateway.admin.post(f"{PATH}/fake-a/drain", headers=said)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "Jörg"
    with RunningGateway(keyed) as gateway:
        gateway.join(worker)
        kept = workers(gateway)["fake-a"]
        assert kept["cordoned_by"] == "Jörg"
        assert datetime.fromisoformat(kept["cordoned_since"]).utcoffset() == timedelta(0)
        uncordon(gateway)
        assert "cordoned_by" not in workers(gateway)["fake-a"]
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin"
        forged = gateway.admin.put(f"{PATH}/fake-a/cordon", headers={"x-paceline-author": "a%0Ab"})
        assert error_of(forged) == (400, "invalid_value")


def test_a_cordon_of_before_anybody_was_asked_who_they_are_still_holds(
    tmp_path: Path, worker: FakeWorker
) -> None:
    kept = '{"cordons": {"fake-a": {"since": "2026-11-01T08:00:00Z"}}}'
    (tmp_path / "state.json").write_text(kept)
    with RunningGateway(settings_for_tests(tmp_path)) as gateway:
        gateway.join(worker)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "unknown"
        assert workers(gateway)["fake-a"]["state"] == "cordoned"


def test_a_stream_that_runs_on_a_cordoned_worker_comes_to_its_end(
    line: RunningGateway, worker: FakeWorker
) -> None:
    worker.script = Script(hang_after=1)
    with line.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        assert cordon(line).json()["in_flight"] == 1
        worker.go_on.set()
        assert "data: [DONE]" in list(lines)


def test_where_all_are_cordoned_nobody_is_asked(line: RunningGateway, worker: FakeWorker) -> None:
    cordon(line)
    assert error_of(line.chat()) == (503, "no_worker")
    assert line.client.get("/readyz").status_code == 503
    assert not worker.heard


def test_who_waits_in_line_is_served_once_the_cordon_is_lifted(
    line: RunningGateway, worker: FakeWorker
) -> None:
    """With every slot taken the fifth request stands in line; a cordon does not send it away."""
    worker.script = Script(hang=True)
    with ThreadPoolExecutor(5) as aside:
        asked = [aside.submit(line.chat) for _ in range(5)]
        eventually(lambda: line.status()["pools"]["vlm"]["waiting"] == 1)
        cordon(line)
        worker.go_on.set()
        eventually(lambda: sum(answer.done() for answer in asked) == 4)
        assert len(worker.heard) == 4
        uncordon(line)
        assert [answer.result().status_code for answer in asked] == [200] * 5


def test_a_cordon_outlives_the_worker_and_the_gateway(tmp_path: Path, worker: FakeWorker) -> None:
    """It is for a worker that is stopped, changed and started again."""
    with RunningGateway(settings_for_tests(tmp_path)) as gateway:
        gateway.join(worker)
        cordon(gateway)
        gateway.leave(worker)
        gone = workers(gateway)["fake-a"]
        assert (gone["state"], gone["lanes"]) == ("gone", [])
        gateway.join(worker, boot_id="boot-2")
        assert workers(gateway)["fake-a"]["state"] == "cordoned"
    with RunningGateway(settings_for_tests(tmp_path)) as gateway:
        gateway.join(worker)
        assert error_of(gateway.chat()) == (503, "no_worker")
        assert uncordon(gateway).status_code == 204
        assert gateway.chat().status_code == 200


def test_gateways_that_share_their_state_share_the_cordons(
    tmp_path: Path, worker: FakeWorker
) -> None:
    settings = settings_for_tests(tmp_path)
    with RunningGateway(settings) as one, RunningGateway(settings) as other:
        one.join(worker)
        other.join(worker)
        cordon(one)
        eventually(lambda: workers(other)["fake-a"]["state"] == "cordoned")
        uncordon(other)
        eventually(lambda: workers(one)["fake-a"]["state"] == "ready")


def test_draining_answers_once_nothing_runs_there(line: RunningGateway, worker: FakeWorker) -> None:
    worker.script = Script(hang_after=1)
    with line.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        soon = line.admin.post(f"{PATH}/fake-a/drain?timeout_s=0").json()
        assert (soon["drained"], soon["in_flight"], soon["state"]) == (False, 1, "cordoned")
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: answers.append(line.admin.post(f"{PATH}/fake-a/drain").json())
        )
        thread.start()
        worker.go_on.set()
        list(lines)
        thread.join(timeout=30)
    assert (answers[0]["drained"], answers[0]["in_flight"]) == (True, 0)


def test_a_cordon_that_is_lifted_ends_the_wait_for_the_drain(
    line: RunningGateway, worker: FakeWorker
) -> None:
    worker.script = Script(hang_after=1)
    with line.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: answers.append(
                line.admin.post(f"{PATH}/fake-a/drain?timeout_s=600").json()
            )
        )
        thread.start()
        with httpx.Client(base_url=line.url) as other:
            eventually(lambda: workers(line)["fake-a"]["state"] == "cordoned")
            assert other.delete(f"{PATH}/fake-a/cordon").status_code == 204
        thread.join(timeout=30)
        assert not answers[0]["drained"]
        worker.go_on.set()
        assert "data: [DONE]" in list(lines)


@pytest.mark.parametrize(
    ("method", "what"), [("PUT", "cordon"), ("DELETE", "cordon"), ("POST", "drain")]
)
def test_a_worker_that_nobody_knows_is_404(line: RunningGateway, method: str, what: str) -> None:
    answer = line.admin.request(method, f"{PATH}/nobody/{what}")
    assert error_of(answer) == (404, "worker_not_found")


@pytest.mark.parametrize("timeout_s", ["-1", "601", "1.5", "", "ten", "٣"])
def test_a_time_to_wait_that_is_none_is_refused_by_name(
    line: RunningGateway, timeout_s: str
) -> None:
    answer = line.admin.post(f"{PATH}/fake-a/drain", params={"timeout_s": timeout_s})
    assert (error_of(answer), answer.json()["error"]["param"]) == (
        (400, "invalid_value"),
        "timeout_s",
    )
    assert workers(line)["fake-a"]["state"] == "ready"


async def test_a_cordon_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"cordons": {"fake-a": {"since": "yesterday"}}}')
    with pytest.raises(StartupError, match="cordons that cannot be understood"):
        await serve(settings_for_tests(tmp_path), ending=Ending())
