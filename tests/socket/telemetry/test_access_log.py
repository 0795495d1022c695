"""The access log: one line of JSON for each request, whatever became of it, and never its text."""

from __future__ import annotations

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
from tests.support.running_gateway import RunningGateway, make_settings, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

SECRET_WORDS = "the-words-of-a-user"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "access.jsonl"


@pytest.fixture
def logging_gateway(tmp_path: Path, file: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    """A gateway that writes an access log, with a worker."""
    file.parent.mkdir()
    with RunningGateway(make_settings(tmp_path, access_log=str(file))) as gateway:
        gateway.send_heartbeat(worker)
        yield gateway


def line_count(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def lines(file: Path, count: int) -> list[dict[str, Any]]:
    """Read the log once it has so many lines."""
    wait_until(lambda: line_count(file) >= count)
    read = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(read) == count
    return read


def test_a_line_tells_decision_reason_worker_prefix_times_tokens_and_acceptance(
    logging_gateway: RunningGateway, file: Path
) -> None:
    with logging_gateway.stream(temperature=0) as response:
        response.read()
    logging_gateway.chat(temperature=0.7)
    streamed, whole = lines(file, 2)
    assert streamed.keys() == whole.keys(), "every line has all fields"
    assert None not in [*streamed.values(), *whole.values()]
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
        "attempts": 1,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "drafts": 1,
        "drafted_tokens": 2,
        "accepted_tokens": 1,
    }
    assert {name: streamed[name] for name in expected} == expected
    assert whole["reason"] == "non_greedy_sampling"
    assert whole["bypass"] == ["non_greedy_sampling"]
    assert 0 < streamed["added_latency_s"] <= streamed["first_token_s"] <= streamed["duration_s"]
    assert whole["first_token_s"] == 0, "of streams alone"


def test_refused_failed_and_abandoned_requests_have_a_line_too_and_none_has_a_word_of_them(
    logging_gateway: RunningGateway, file: Path, worker: ScriptedWorker
) -> None:
    said = [{"role": "user", "content": SECRET_WORDS}]
    logging_gateway.chat(messages=said, temperature=9)
    logging_gateway.chat(messages=said, model=SECRET_WORDS)
    worker.script = Script(
        status=400, body=b'{"error": {"message": "no", "code": "%s"}}' % (SECRET_WORDS.encode())
    )
    logging_gateway.chat(messages=said)
    worker.script = Script(drop=True)
    logging_gateway.chat(messages=said)
    worker.script = Script(hang_after=1)  # so that the client leaves first, however late
    with logging_gateway.stream(messages=said) as response:
        next(response.iter_raw())
    told = lines(file, 5)
    assert [(line["outcome"], line["status"], line["code"]) for line in told] == [
        ("refused", 400, "invalid_value"),
        ("refused", 404, "model_not_found"),
        ("refused", 400, "refused_by_worker"),
        ("failed", 502, "worker_lost"),
        ("client_left", 499, ""),
    ]
    assert SECRET_WORDS not in file.read_text()


def test_until_a_worker_was_found_a_models_name_is_a_word_of_the_client(
    tmp_path: Path, file: Path
) -> None:
    file.parent.mkdir()
    with RunningGateway(make_settings(tmp_path, access_log=str(file))) as gateway:
        assert gateway.chat(model=SECRET_WORDS).status_code == 503
        (told,) = lines(file, 1)
    assert (told["outcome"], told["code"], told["model"]) == ("unserved", "no_worker", "")
    assert SECRET_WORDS not in file.read_text()


def test_a_log_that_was_moved_away_goes_on_in_a_new_file(
    logging_gateway: RunningGateway, file: Path
) -> None:
    logging_gateway.chat()
    lines(file, 1)
    file.rename(file.with_suffix(".1"))
    logging_gateway.chat()
    wait_until(file.exists)
    assert len(lines(file, 1)) == len(lines(file.with_suffix(".1"), 1))


def test_a_log_that_cannot_be_opened_anew_loses_lines_and_goes_on_once_it_can(
    logging_gateway: RunningGateway, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging_gateway.chat()
    lines(file, 1)
    file.parent.rename(file.parent.with_name("moved"))
    logging_gateway.chat()
    wait_until(lambda: "access_log.lines_lost lines=1" in caplog.text)
    file.parent.mkdir()
    logging_gateway.chat()
    wait_until(file.exists)
    assert len(lines(file, 1)) == 1


def test_what_is_not_written_yet_is_written_at_the_end(
    tmp_path: Path, file: Path, worker: ScriptedWorker
) -> None:
    file.parent.mkdir()
    with RunningGateway(make_settings(tmp_path, access_log=str(file))) as gateway:
        gateway.send_heartbeat(worker)
        for _ in range(3):
            gateway.chat()
    assert len(lines(file, 3)) == 3


async def test_a_log_that_cannot_be_opened_stops_the_start_before_anything_is_kept(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path, access_log=str(tmp_path / "no" / "folder" / "log"))
    with pytest.raises(StartupError, match="PACELINE_ACCESS_LOG"):
        await create_app(settings)
    assert not (tmp_path / "state.json").exists()


def test_a_dash_is_standard_output() -> None:
    program = """
import asyncio
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Outcome
async def main():
    async with AccessLog("-") as log:
        log.write(RequestRecord("req-1", Outcome.REFUSED, 400, 0.1), 0.0)
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(ran.stdout)["request"] == "req-1"


async def test_each_line_is_written_or_counted_as_lost_when_the_queue_is_full(
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


async def test_a_reader_that_reads_nothing_holds_up_neither_requests_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "_CLOSE_TIMEOUT_S", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with AccessLog(str(pipe)) as log:
            for number in range(1000):  # more than a pipe holds
                log.write(RequestRecord(f"req-{number}", Outcome.REFUSED, 400, 0.1), 0.0)
        assert "access_log.close_timeout" in caplog.text
        whole = b""
        while whole.count(b"\n") < 1000:  # the thread that hung goes on once it is read
            with contextlib.suppress(BlockingIOError):
                whole += os.read(reader, 1 << 20)
            await asyncio.sleep(0.001)
    finally:
        os.close(reader)
    assert [json.loads(line)["request"] for line in whole.splitlines()] == [
        f"req-{number}" for number in range(1000)
    ]


def test_a_process_ends_though_nobody_reads_its_log() -> None:
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
