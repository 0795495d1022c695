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
from gateway.server import serve
from tests.support.running_gateway import RunningGateway, make_settings, status_and_code, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker
from workers.lifecycle import Shutdown

PATH = "/admin/v1/workers"


def workers(gateway: RunningGateway) -> dict[str, dict[str, Any]]:
    listed = gateway.admin.get(PATH).json()["workers"]
    return {worker["worker_id"]: worker for worker in listed}


def cordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.put(f"{PATH}/{name}/cordon")


def uncordon(gateway: RunningGateway, name: str = "fake-a") -> httpx.Response:
    return gateway.admin.delete(f"{PATH}/{name}/cordon")


def heard(gateway: RunningGateway, *fakes: ScriptedWorker) -> list[int]:
    """Send six requests and count who got how many."""
    before = [len(fake.requests) for fake in fakes]
    assert [gateway.chat().status_code for _ in range(6)] == [200] * 6
    return [len(fake.requests) - was for fake, was in zip(fakes, before, strict=True)]


def test_a_cordoned_worker_gets_no_request_until_that_is_lifted(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway_with_worker.send_heartbeat(second_worker)
    told = cordon(gateway_with_worker)
    assert told.status_code == 200
    assert (told.json()["state"], told.json()["in_flight"]) == ("cordoned", 0)
    assert "cordoned_since" in told.json()
    assert heard(gateway_with_worker, worker, second_worker) == [0, 6]
    assert gateway_with_worker.status()["workers"]["fake-a"]["state"] == "cordoned"
    assert uncordon(gateway_with_worker).status_code == 204
    assert "cordoned_since" not in workers(gateway_with_worker)["fake-a"]
    wait_until(lambda: heard(gateway_with_worker, worker, second_worker)[0] > 0)


def test_a_cordon_tells_since_when_and_by_whom(tmp_path: Path, worker: ScriptedWorker) -> None:
    settings = make_settings(tmp_path)
    keyed = settings.model_copy(update={"admin_key": SecretStr("admin-key")})
    said = {"x-paceline-author": quote("Jörg")}
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "loopback"
        gateway.admin.put(f"{PATH}/fake-a/cordon", headers=said)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "loopback", "the first one counts"
        uncordon(gateway)
        gateway.admin.post(f"{PATH}/fake-a/drain", headers=said)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "Jörg"
    with RunningGateway(keyed) as gateway:
        gateway.send_heartbeat(worker)
        kept = workers(gateway)["fake-a"]
        assert kept["cordoned_by"] == "Jörg"
        assert datetime.fromisoformat(kept["cordoned_since"]).utcoffset() == timedelta(0)
        uncordon(gateway)
        assert "cordoned_by" not in workers(gateway)["fake-a"]
        cordon(gateway)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "admin"
        forged = gateway.admin.put(f"{PATH}/fake-a/cordon", headers={"x-paceline-author": "a%0Ab"})
        assert status_and_code(forged) == (400, "invalid_value")


def test_a_cordon_of_before_anybody_was_asked_who_they_are_still_holds(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    kept = '{"cordons": {"fake-a": {"since": "2026-11-01T08:00:00Z"}}}'
    (tmp_path / "state.json").write_text(kept)
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        assert workers(gateway)["fake-a"]["cordoned_by"] == "unknown"
        assert workers(gateway)["fake-a"]["state"] == "cordoned"


def test_a_stream_that_runs_on_a_cordoned_worker_comes_to_its_end(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        assert cordon(gateway_with_worker).json()["in_flight"] == 1
        worker.resume.set()
        assert "data: [DONE]" in list(lines)


def test_where_all_are_cordoned_nobody_is_asked(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    cordon(gateway_with_worker)
    assert status_and_code(gateway_with_worker.chat()) == (503, "no_worker")
    assert gateway_with_worker.client.get("/readyz").status_code == 503
    assert not worker.requests


def test_who_waits_in_line_is_served_once_the_cordon_is_lifted(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """With every slot taken the fifth request stands in line; a cordon does not send it away."""
    worker.script = Script(hang=True)
    with ThreadPoolExecutor(5) as executor:
        asked = [executor.submit(gateway_with_worker.chat) for _ in range(5)]
        wait_until(lambda: gateway_with_worker.status()["pools"]["vlm"]["waiting"] == 1)
        cordon(gateway_with_worker)
        worker.resume.set()
        wait_until(lambda: sum(response.done() for response in asked) == 4)
        assert len(worker.requests) == 4
        uncordon(gateway_with_worker)
        assert [response.result().status_code for response in asked] == [200] * 5


def test_a_cordon_outlives_the_worker_and_the_gateway(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    """It is for a worker that is stopped, changed and started again."""
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        cordon(gateway)
        gateway.remove_worker(worker)
        gone = workers(gateway)["fake-a"]
        assert (gone["state"], gone["lanes"]) == ("gone", [])
        gateway.send_heartbeat(worker, boot_id="boot-2")
        assert workers(gateway)["fake-a"]["state"] == "cordoned"
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.send_heartbeat(worker)
        assert status_and_code(gateway.chat()) == (503, "no_worker")
        assert uncordon(gateway).status_code == 204
        assert gateway.chat().status_code == 200


def test_gateways_that_share_their_state_share_the_cordons(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    settings = make_settings(tmp_path)
    with RunningGateway(settings) as one, RunningGateway(settings) as other:
        one.send_heartbeat(worker)
        other.send_heartbeat(worker)
        cordon(one)
        wait_until(lambda: workers(other)["fake-a"]["state"] == "cordoned")
        uncordon(other)
        wait_until(lambda: workers(one)["fake-a"]["state"] == "ready")


def test_draining_answers_once_nothing_runs_there(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        soon = gateway_with_worker.admin.post(f"{PATH}/fake-a/drain?timeout_s=0").json()
        assert (soon["drained"], soon["in_flight"], soon["state"]) == (False, 1, "cordoned")
        responses: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: responses.append(
                gateway_with_worker.admin.post(f"{PATH}/fake-a/drain").json()
            )
        )
        thread.start()
        worker.resume.set()
        list(lines)
        thread.join(timeout=30)
    assert (responses[0]["drained"], responses[0]["in_flight"]) == (True, 0)


def test_a_cordon_that_is_lifted_ends_the_wait_for_the_drain(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with gateway_with_worker.stream() as stream:
        lines = stream.iter_lines()
        next(lines)
        responses: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: responses.append(
                gateway_with_worker.admin.post(f"{PATH}/fake-a/drain?timeout_s=600").json()
            )
        )
        thread.start()
        with httpx.Client(base_url=gateway_with_worker.url) as other:
            wait_until(lambda: workers(gateway_with_worker)["fake-a"]["state"] == "cordoned")
            assert other.delete(f"{PATH}/fake-a/cordon").status_code == 204
        thread.join(timeout=30)
        assert not responses[0]["drained"]
        worker.resume.set()
        assert "data: [DONE]" in list(lines)


@pytest.mark.parametrize(
    ("method", "what"), [("PUT", "cordon"), ("DELETE", "cordon"), ("POST", "drain")]
)
def test_a_worker_that_nobody_knows_is_404(
    gateway_with_worker: RunningGateway, method: str, what: str
) -> None:
    response = gateway_with_worker.admin.request(method, f"{PATH}/nobody/{what}")
    assert status_and_code(response) == (404, "worker_not_found")


@pytest.mark.parametrize("timeout_s", ["-1", "601", "1.5", "", "ten", "٣"])
def test_a_time_to_wait_that_is_none_is_refused_by_name(
    gateway_with_worker: RunningGateway, timeout_s: str
) -> None:
    response = gateway_with_worker.admin.post(
        f"{PATH}/fake-a/drain", params={"timeout_s": timeout_s}
    )
    assert (status_and_code(response), response.json()["error"]["param"]) == (
        (400, "invalid_value"),
        "timeout_s",
    )
    assert workers(gateway_with_worker)["fake-a"]["state"] == "ready"


async def test_a_cordon_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"cordons": {"fake-a": {"since": "yesterday"}}}')
    with pytest.raises(StartupError, match="cordons are damaged"):
        await serve(make_settings(tmp_path), shutdown=Shutdown())
