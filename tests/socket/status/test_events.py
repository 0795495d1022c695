"""`/v1/status/events`: the state once a second, for as long as somebody may and wants to see it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, SecretStr

from gateway.errors import ShuttingDown
from gateway.status.events import VIEWERS_LIMIT, StatusFeed
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    make_settings,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import Script, ScriptedWorker

EVENTS = "/v1/status/events"


@contextlib.contextmanager
def watching(line: RunningGateway, **headers: str) -> Iterator[Iterator[str]]:
    """Watch as a client of its own; gives the lines that say something."""
    with (
        httpx.Client(base_url=line.url, timeout=30, headers=headers) as client,
        client.stream("GET", EVENTS) as stream,
    ):
        assert stream.status_code == 200
        assert stream.headers["content-type"] == "text/event-stream"
        yield filter(None, stream.iter_lines())


def told(line: str) -> dict[str, Any]:
    assert line.startswith("data: ")
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return found


def test_each_event_is_what_the_status_says(gateway_with_worker: RunningGateway) -> None:
    assert gateway_with_worker.chat().status_code == 200
    with watching(gateway_with_worker) as events:
        first, second = told(next(events)), told(next(events))
    status = gateway_with_worker.status()
    assert first.keys() == second.keys() == status.keys()
    assert first["decisions"] == status["decisions"]
    assert first["workers"].keys() == {"fake-a"}
    assert second["gateway"]["uptime_s"] > first["gateway"]["uptime_s"]


def test_all_who_watch_see_the_same_snapshots(gateway_with_worker: RunningGateway) -> None:
    with watching(gateway_with_worker) as one, watching(gateway_with_worker) as other:
        seen = [{next(events) for _ in range(4)} for events in (one, other)]
    assert len(seen[0]) == len(seen[1]) == 4
    assert seen[0] & seen[1]


def test_a_viewer_that_leaves_makes_room_for_another(gateway_with_worker: RunningGateway) -> None:
    with contextlib.ExitStack() as viewers:
        present = [
            viewers.enter_context(watching(gateway_with_worker)) for _ in range(VIEWERS_LIMIT)
        ]
        for events in present:
            next(events)
        refused = gateway_with_worker.client.get(EVENTS)
        assert status_and_code(refused) == (503, "too_many_viewers")
        assert refused.headers["retry-after"] == "10"
        assert gateway_with_worker.client.get("/v1/status").status_code == 200

    def there_is_room() -> bool:
        with gateway_with_worker.client.stream("GET", EVENTS) as stream:
            return stream.status_code == 200

    wait_until(there_is_room)


def test_watching_needs_the_right_that_the_status_needs(
    gateway_with_worker: RunningGateway,
) -> None:
    everything, some = (
        gateway_with_worker.create_key(),
        gateway_with_worker.create_key(models=["demo"]),
    )
    assert status_and_code(gateway_with_worker.client.get(EVENTS)) == (401, "invalid_api_key")
    assert status_and_code(
        gateway_with_worker.client.get(EVENTS, headers=bearer_headers(some))
    ) == (
        403,
        "permission_denied",
    )
    with watching(gateway_with_worker, **bearer_headers(everything)) as events:
        assert "workers" in told(next(events))


def test_who_loses_the_key_sees_nothing_more(gateway_with_worker: RunningGateway) -> None:
    key = gateway_with_worker.create_key()
    with watching(gateway_with_worker, **bearer_headers(key)) as events:
        assert "workers" in told(next(events))
        gateway_with_worker.admin.delete(f"/admin/v1/keys/{key['id']}").raise_for_status()
        *_, last = events
    assert told(last)["error"]["code"] == "invalid_api_key"


def test_the_first_key_shuts_out_who_watches_without_one(
    gateway_with_worker: RunningGateway,
) -> None:
    with watching(gateway_with_worker) as events:
        assert "workers" in told(next(events))
        gateway_with_worker.create_key()
        *_, last = events
    assert told(last)["error"]["code"] == "invalid_api_key"


def test_what_breaks_the_state_is_an_event_in_our_words_and_stands_in_the_log(
    gateway_with_worker: RunningGateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with watching(gateway_with_worker) as events:
        assert "workers" in told(next(events))
        monkeypatch.setattr("gateway.status.render.mtp_status", lambda _lanes: 1 / 0)
        *_, last = events
    assert told(last)["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text


def test_the_end_of_the_gateway_is_an_event_and_comes_after_the_answers(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(hang_after=1)
    with watching(gateway_with_worker) as events, gateway_with_worker.stream() as response:
        words = response.iter_lines()
        next(words)
        gateway_with_worker.request_shutdown()
        while not told(next(events))["gateway"]["stopping"]:
            pass
        threading.Timer(0.1, worker.resume.set).start()
        assert "data: [DONE]" in list(words)
        *_, name, last = events
    assert (name, last) == ("event: end", "data: {}")
    gateway_with_worker.wait_closed()


def test_nobody_begins_to_watch_a_gateway_that_has_ended(tmp_path: Path) -> None:
    """Behind the last event the connection is closed, so that the gateway can end at once."""
    settings = make_settings(tmp_path, drain_timeout_s=60, admin_key=SecretStr("admin"))
    with RunningGateway(settings) as running, watching(running) as events:
        next(events)
        running.request_shutdown()
        assert list(events)[-2:] == ["event: end", "data: {}"]
        running.wait_closed()
        with pytest.raises(httpx.ConnectError):
            running.client.get(EVENTS)


async def test_who_asks_on_a_kept_connection_behind_the_last_event_is_refused() -> None:
    async def take() -> BaseModel:
        raise AssertionError("nobody is to be shown anything")

    async def allowed() -> None:
        pass

    feed = StatusFeed(take)
    feed.close()
    with pytest.raises(ShuttingDown):
        await feed.stream_to({}, allowed)
    assert feed.viewers == 0
