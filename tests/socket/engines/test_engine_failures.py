"""Engines that are busy, fail or refuse: what clients see, and what becomes of the engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway.config.static_workers import StaticWorker
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, event

BUSY = Script(status=503, body=b'{"error": "Loading model"}', headers=((b"retry-after", b"1"),))


def gateway_of(folder: Path, *workers: ScriptedWorker, slots: int = 4) -> RunningGateway:
    """Return a gateway of these engines, each an OpenAI server."""
    entries = tuple(
        StaticWorker(id=one.worker_id, kind="openai", url=one.url, models=("demo",), slots=slots)
        for one in workers
    )
    return RunningGateway(make_settings(folder, workers=entries))


def all_ready(gateway: RunningGateway, count: int) -> bool:
    return len(gateway.status()["pools"]["vlm"]["workers"]) == count


def test_a_busy_engine_is_waited_for(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.script = Script(rotation=(BUSY, Script(), Script()))
    with gateway_of(tmp_path, worker) as gateway:
        wait_until(lambda: all_ready(gateway, 1))
        with ThreadPoolExecutor(3) as executor:
            responses = list(executor.map(lambda _: gateway.chat(), range(3)))
        assert {response.status_code for response in responses} == {200}
        assert len(worker.requests) >= 4, "one of them was told to come again"


def test_an_engine_that_stays_busy_is_said_to_be(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.script = BUSY
    file = tmp_path / "policy.yaml"
    file.write_text(
        "version: 1\nroutes: [{name: all, to: [vlm]}]\n"
        "pools: {vlm: {lanes: [vlm], queue: {timeout_s: 1.5}}}\n"
    )
    entry = StaticWorker(id="mac", kind="openai", url=worker.url, models=("demo",))
    with RunningGateway(make_settings(tmp_path, workers=(entry,), policy=file)) as gateway:
        wait_until(lambda: all_ready(gateway, 1))
        busy = gateway.chat()
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "workers_busy")
    assert "retry-after" in busy.headers


def test_a_refusal_in_the_first_event_of_a_stream_is_the_clients(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    message = "prompt is too long for /Users/ann/demo"
    worker.script = Script(events=(event({"error": {"message": message}}),))
    with gateway_of(tmp_path, worker) as gateway:
        wait_until(lambda: all_ready(gateway, 1))
        for _ in range(6):
            refused = gateway.chat(stream=True)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert "Users" not in refused.text
        assert gateway.status()["workers"]["fake-a"]["state"] == "ready"


def test_an_error_after_the_first_event_ends_the_stream(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    begun = event({"choices": [{"index": 0, "delta": {"content": "one"}, "finish_reason": None}]})
    worker.script = Script(events=(begun, event({"error": "out of memory at 0x7"}), DONE))
    with gateway_of(tmp_path, worker) as gateway:
        wait_until(lambda: all_ready(gateway, 1))
        text = gateway.chat(stream=True).text
    assert '"worker_failed"' in text
    assert "[DONE]" not in text
    assert "0x7" not in text


def test_what_an_engine_does_not_tell_is_unknown_in_the_usage_of_a_key(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    silent = b'{"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}'
    worker.script = Script(body=silent)
    with gateway_of(tmp_path, worker) as gateway:
        wait_until(lambda: all_ready(gateway, 1))
        gateway.use_key(gateway.create_key(name="ann")["secret"])
        assert gateway.chat().status_code == 200
        lane = gateway.status()["workers"]["fake-a"]["lanes"]["vlm"]
        assert lane["requests"] == 1
        assert lane["unreported"] == {"usage": 1, "cached_tokens": 1, "drafts": 1}
        (row,) = gateway.admin.get("/admin/v1/usage").json()["rows"]
        assert (row["requests"], row["cached_unknown_requests"]) == (1, 1)
        assert row["guessed_tokens"] > 0


def test_of_two_engines_one_that_answers_nine_of_ten_with_500_is_seen_by_no_client(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    broken = Script(status=500, body=b'{"error": "Failed at /Users/ann"}')
    worker.script = Script(rotation=(*[broken] * 9, Script()))
    with gateway_of(tmp_path, worker, second_worker, slots=16) as gateway:
        wait_until(lambda: all_ready(gateway, 2))
        with ThreadPoolExecutor(16) as executor:
            responses = list(executor.map(lambda n: gateway.chat(stream=bool(n % 2)), range(100)))
        assert {response.status_code for response in responses} == {200}
        assert not [one for one in responses if b"error" in one.content]
    assert any(not one.generated for one in worker.requests), "the broken engine was asked"
