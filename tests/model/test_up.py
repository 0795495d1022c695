"""`paceline up` from the first line it prints to the last process it leaves: none."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.openai_requests import LONG_TEXT, text_body
from tests.support.paceline_process import (
    READY_AGAIN,
    UpProcess,
    connection_to,
    process_environment,
    running_up,
)


def run_paceline(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=folder,
        env=process_environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_up_prints_a_snippet_that_runs_as_it_stands(up: UpProcess) -> None:
    said = "\n".join(up.lines)
    snippet = said[said.index("from openai") : said.index("print(answer")]
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["answer"].choices[0].message.content  # type: ignore[attr-defined]
    names["client"].close()  # type: ignore[attr-defined]


def test_up_says_that_the_demo_is_a_toy(up: UpProcess) -> None:
    assert any("toy model" in text and "--model" in text for text in up.lines)


def test_up_tells_how_another_mac_joins_and_keeps_the_token_private(up: UpProcess) -> None:
    (join,) = [text for text in up.lines if " worker --join " in text]
    kept = up.state_dir / "join-token"
    assert f"--token {kept.read_text()}" in join
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    arguments = Path(f"/proc/{up.worker_pid()}/cmdline")
    if arguments.exists():  # macOS has no such file
        assert kept.read_text() not in arguments.read_text()


def test_killed_worker_is_started_again_and_its_counts_are_kept(tmp_path: Path) -> None:
    with running_up(tmp_path) as line:
        body = text_body(line.model, "Hello!", temperature=0)
        assert httpx.post(f"{line.url}/v1/chat/completions", json=body, timeout=60).is_success
        before = httpx.get(f"{line.url}/v1/status").json()
        os.kill(line.worker_pid(), signal.SIGKILL)
        line.wait_for(READY_AGAIN)
        assert line.worker_pid(life=2) != line.worker_pid(life=1)
        assert httpx.post(f"{line.url}/v1/chat/completions", json=body, timeout=60).is_success
        after = httpx.get(f"{line.url}/v1/status").json()
    assert after["pools"]["text-mtp"]["requests"] == before["pools"]["text-mtp"]["requests"] + 1
    assert after["mtp"]["attempted"] == 2 * before["mtp"]["attempted"]


def test_ctrl_c_lets_the_running_stream_end_and_leaves_no_worker(tmp_path: Path) -> None:
    with running_up(tmp_path) as line:
        (worker,) = line.workers()
        body = text_body(line.model, LONG_TEXT, temperature=0, stream=True)
        with (
            connection_to(worker["url"]) as connection,
            httpx.stream(
                "POST", f"{line.url}/v1/chat/completions", json=body, timeout=60
            ) as answer,
        ):
            events = answer.iter_lines()
            next(events)
            line.process.send_signal(signal.SIGINT)
            assert [event for event in events if event][-1] == "data: [DONE]"
            assert line.wait_for_end() == 0
            assert connection.recv(1) == b""


def test_worker_ends_with_a_gateway_that_was_killed(tmp_path: Path) -> None:
    with running_up(tmp_path) as line:
        (worker,) = line.workers()
        with connection_to(worker["url"]) as connection:
            line.process.kill()
            assert connection.recv(1) == b""


def test_up_with_an_unusable_model_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ended = run_paceline(tmp_path, "up", "--port", "0", "--model", str(tmp_path / "empty"))
    assert ended.returncode == 1
    assert "the worker cannot start" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_up_on_a_taken_port_ends_with_one_sentence(up: UpProcess, tmp_path: Path) -> None:
    port = up.url.rpartition(":")[2]
    ended = run_paceline(tmp_path, "up", "--port", port)
    assert ended.returncode == 2
    assert re.fullmatch(r"paceline: Cannot listen on [^\n]*\n", ended.stderr)


def test_up_beyond_this_machine_needs_a_key(tmp_path: Path) -> None:
    ended = run_paceline(tmp_path, "up", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "PACELINE_API_KEY" in ended.stderr


def test_status_shows_lanes_workers_and_acceptance(up: UpProcess, tmp_path: Path) -> None:
    shown = run_paceline(tmp_path, "status", "--url", up.url)
    assert shown.returncode == 0
    for name in ("text-mtp", "vlm", up.workers()[0]["worker_id"], "Accepted"):
        assert name in shown.stdout
    told = run_paceline(tmp_path, "status", "--url", up.url, "--json")
    assert json.loads(told.stdout)["gateway"]["ready"] is True


def test_status_without_a_gateway_is_one_sentence(tmp_path: Path) -> None:
    shown = run_paceline(tmp_path, "status", "--url", "http://127.0.0.1:1")
    assert shown.returncode == 1
    assert re.fullmatch(r"paceline: no gateway answers at [^\n]*\n", shown.stderr)


def test_explain_says_where_a_request_would_go(up: UpProcess, tmp_path: Path) -> None:
    for temperature, pool in ((0, "text-mtp"), (1, "vlm")):
        request = tmp_path / "request.json"
        request.write_text(json.dumps(text_body(up.model, temperature=temperature)))
        told = run_paceline(tmp_path, "explain", str(request), "--url", up.url)
        assert json.loads(told.stdout)["pool"] == pool
