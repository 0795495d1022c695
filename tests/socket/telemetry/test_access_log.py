"""The access log: one JSON line per request with any outcome, without the request's text."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app import create_app
from gateway.errors import StartupError
from gateway.telemetry import access_log
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Outcome
from tests.support.running_gateway import RunningGateway, begun, make_settings, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

SECRET_TEXT = "the-text-of-a-user"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "access.jsonl"


@pytest.fixture
def logging_gateway(tmp_path: Path, file: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    """Return a gateway that writes an access log, with one worker."""
    file.parent.mkdir()
    with RunningGateway(make_settings(tmp_path, access_log=str(file))) as gateway:
        gateway.join(worker)
        yield gateway


def line_count(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def read_entries(file: Path, count: int) -> list[dict[str, Any]]:
    """Wait until the log has so many lines, then return them parsed."""
    wait_until(lambda: line_count(file) >= count)
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(entries) == count
    return entries


def test_a_line_has_decision_reason_worker_prefix_times_tokens_and_acceptance(
    logging_gateway: RunningGateway, file: Path
) -> None:
    with logging_gateway.stream(temperature=0) as response:
        response.read()
    logging_gateway.chat(temperature=0.7)
    streamed, unstreamed = read_entries(file, 2)
    assert streamed.keys() == unstreamed.keys(), "every line has all fields"
    assert None not in [*streamed.values(), *unstreamed.values()]
    assert streamed["request"] == response.headers["x-request-id"]
    expected = {
        "event": "request.done",
        "endpoint": "chat",
        "stream": True,
        "outcome": "completed",
        "status": 200,
        "code": "",
        "model": "demo",
        "route": "greedy-text",
        "bypass": [],
        "pool": "text-mtp",
        "lane": "text-mtp",
        "worker": "fake-a",
        "reason": "eligible",
        "prefix": "none",
        "not_reused": "",
        "attempts": 1,
        "failovers": 0,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "drafts": 1,
        "drafted_tokens": 2,
        "accepted_tokens": 1,
    }
    assert {name: streamed[name] for name in expected} == expected
    assert unstreamed["reason"] == "non_greedy_sampling"
    assert unstreamed["bypass"] == ["non_greedy_sampling"]
    assert 0 < streamed["added_latency_s"] <= streamed["first_token_s"] <= streamed["duration_s"]
    assert unstreamed["first_token_s"] == 0, "only streams have a first token time"


def test_rejected_failed_and_aborted_requests_are_logged_without_their_text(
    logging_gateway: RunningGateway, file: Path, worker: ScriptedWorker
) -> None:
    messages = [{"role": "user", "content": SECRET_TEXT}]
    logging_gateway.chat(messages=messages, temperature=9)
    logging_gateway.chat(messages=messages, model=SECRET_TEXT)
    error = b'{"error": {"message": "no", "code": "%s"}}' % SECRET_TEXT.encode()
    worker.script = Script(status=400, body=error)
    logging_gateway.chat(messages=messages)
    worker.script = Script(drop=True)
    logging_gateway.chat(messages=messages)
    worker.script = Script(hang_after=1)  # the client always disconnects before the worker finishes
    with begun(logging_gateway.stream(messages=messages)):
        pass
    entries = read_entries(file, 5)
    assert [(entry["outcome"], entry["status"], entry["code"]) for entry in entries] == [
        ("refused", 400, "invalid_value"),
        ("refused", 404, "model_not_found"),
        ("refused", 400, "refused_by_worker"),
        ("failed", 502, "worker_lost"),
        ("client_left", 499, ""),
    ]
    assert SECRET_TEXT not in file.read_text()


def test_without_a_worker_the_models_name_is_not_logged_and_a_shutdown_writes_pending_lines(
    tmp_path: Path, file: Path
) -> None:
    file.parent.mkdir()
    with RunningGateway(make_settings(tmp_path, access_log=str(file))) as gateway:
        for _ in range(3):
            assert gateway.chat(model=SECRET_TEXT).status_code == 503
    for entry in read_entries(file, 3):
        assert (entry["outcome"], entry["code"], entry["model"]) == ("unserved", "no_worker", "")
    assert SECRET_TEXT not in file.read_text()


def test_after_a_rotation_the_log_continues_in_a_new_file_and_counts_lines_that_it_cannot_write(
    logging_gateway: RunningGateway, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging_gateway.chat()
    read_entries(file, 1)
    file.rename(file.with_suffix(".1"))
    logging_gateway.chat()
    wait_until(file.exists)
    assert len(read_entries(file, 1)) == len(read_entries(file.with_suffix(".1"), 1))
    file.parent.rename(file.parent.with_name("moved"))
    logging_gateway.chat()
    wait_until(lambda: "access_log.lines_lost lines=1" in caplog.text)
    file.parent.mkdir()
    logging_gateway.chat()
    wait_until(file.exists)
    read_entries(file, 1)


async def test_a_log_that_cannot_be_opened_fails_the_start_before_state_is_written(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path, access_log=str(tmp_path / "no" / "folder" / "log"))
    with pytest.raises(StartupError, match="PACELINE_ACCESS_LOG"):
        await create_app(settings)
    assert not (tmp_path / "state.json").exists()


async def test_with_a_full_queue_each_line_is_written_or_counted_as_lost(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "_QUEUE_LIMIT", 10)
    file.parent.mkdir()
    async with AccessLog(str(file)) as log:
        for number in range(10_000):
            log.write(RequestRecord(f"req-{number}", Outcome.REFUSED, 400, 0.1), 0.0)
    written = line_count(file)
    lost = re.findall(r"access_log.lines_lost lines=(\d+) reason=queue full", caplog.text)
    assert written >= 10
    assert lost
    assert written + sum(map(int, lost)) == 10_000


async def test_a_stalled_reader_blocks_neither_requests_nor_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "_CLOSE_TIMEOUT_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AccessLog(str(pipe)) as log:
            for number in range(1000):  # more than the capacity of a pipe
                log.write(RequestRecord(f"req-{number}", Outcome.REFUSED, 400, 0.1), 0.0)
        assert "access_log.close_timeout" in caplog.text
        received = b""
        while received.count(b"\n") < 1000:  # the blocked thread continues once the pipe is read
            with contextlib.suppress(BlockingIOError):
                received += os.read(reader, 1 << 20)
            await asyncio.sleep(0.001)
    finally:
        os.close(reader)
    requests = [json.loads(line)["request"] for line in received.splitlines()]
    assert requests == [f"req-{number}" for number in range(1000)]


def test_a_dash_means_standard_output_and_a_process_exits_although_it_is_not_read() -> None:
    program = """
import asyncio
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Outcome
async def main():
    async with AccessLog("-") as log:
        for number in range(1000):
            log.write(RequestRecord(f"req-{number}", Outcome.REFUSED, 400, 0.1), 0.0)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.wait(30) == 0
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["request"] == "req-0"
