"""`paceline up`, from its first line of output to the end of its last process."""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.cli import main
from tests.support.gateway_fixtures import remove_settings
from tests.support.openai_requests import LONG_TEXT, text_body
from tests.support.paceline_forks import PIPES, PacelineFork
from tests.support.paceline_process import (
    READY_AGAIN,
    UpProcess,
    connection_to,
    process_environment,
    running_up,
)

Paceline = Callable[..., str]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpProcess]:
    """Run `paceline up` on the demo model, which the last test ends."""
    with running_up(tmp_path_factory.mktemp("up")) as running:
        yield running


@pytest.fixture
def paceline(monkeypatch, capsys, tmp_path) -> Paceline:
    """Return a function that runs a command in this process, and returns what it prints."""
    remove_settings(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, beside: UpProcess, exit_code: int = 0) -> str:
        monkeypatch.setenv("PACELINE_STATE_DIR", str(beside.state_dir))
        assert main([*arguments, "--url", beside.url]) == exit_code
        return capsys.readouterr().out

    return run


def end_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    with PacelineFork(arguments, **PIPES, env=process_environment(folder), cwd=folder) as process:
        output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def test_up_prints_a_command_that_asks_and_runs_unchanged(up: UpProcess) -> None:
    command = up.wait_for(r"^    (curl .*)$")[1]
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"].startswith("1, 2, 3")


def test_l9_c3_up_prints_only_the_place_of_its_secrets_into_a_pipe(up: UpProcess) -> None:
    """And that the demo is a toy model."""
    assert any("toy model" in text and "--model" in text for text in up.lines)
    assert not any("Warning" in text for text in up.lines), "of a library"
    up.wait_for(rf"^Admin page: {up.url}/admin \(admin key: {up.state_dir}/admin-key\)$")
    for name in ("join-token", "admin-key"):
        assert (up.state_dir / name).read_text() not in "\n".join(up.lines)


def test_up_protects_the_join_token(up: UpProcess) -> None:
    token_file = up.state_dir / "join-token"
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    arguments = Path(f"/proc/{up.worker_pid()}/cmdline")
    if arguments.exists():  # macOS has no such file
        assert token_file.read_text() not in arguments.read_text()


def test_up_with_an_unusable_model_exits_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{")
    result = end_of(tmp_path, "up", "--port", "0", "--model", str(tmp_path / "empty"))
    assert result.returncode == 1
    assert "empty cannot be loaded (config.json is not JSON)." in result.stdout
    assert "the worker cannot start" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_up_on_a_used_port_exits_with_one_line(up: UpProcess, tmp_path: Path) -> None:
    port = up.url.rpartition(":")[2]
    result = end_of(tmp_path, "up", "--port", port)
    assert result.returncode == 2
    assert re.fullmatch(r"paceline: Cannot listen on [^\n]*\n", result.stderr)
    assert f"a gateway already runs at {up.url}; `paceline status --url {up.url}`" in result.stderr


def test_up_beyond_this_machine_requires_a_key(paceline, capsys) -> None:
    assert main(["up", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "PACELINE_API_KEY" in capsys.readouterr().err


def test_status_shows_lanes_workers_and_acceptance(up: UpProcess, paceline: Paceline) -> None:
    shown = paceline("status", beside=up)
    for name in ("text-mtp", "vlm", up.workers()[0]["worker_id"], "Accepted"):
        assert name in shown
    assert json.loads(paceline("status", "--json", beside=up))["gateway"]["ready"] is True


def test_c3_a_newcomer_gets_a_link_creates_a_key_and_ends_all_with_ctrl_c(
    tmp_path: Path, paceline: Paceline
) -> None:
    """`paceline keys` works beside it without settings, and the running stream is finished."""
    with running_up(tmp_path, terminal=True) as up:
        link = up.wait_for(r"^Admin page: (\S+)$")[1]
        assert link == f"{up.url}/admin#admin-key={(up.state_dir / 'admin-key').read_text()}"
        created = paceline("keys", "create", "Ann", "--yes", "--json", beside=up)
        key = json.loads(created)["secret"]
        assert key.startswith("pk-")
        (worker,) = up.workers()
        body = text_body(up.model, LONG_TEXT, temperature=0, stream=True)
        with (
            connection_to(worker["url"]) as connection,
            httpx.stream(
                *("POST", f"{up.url}/v1/chat/completions"),
                headers={"authorization": f"Bearer {key}"},
                json=body,
                timeout=60,
            ) as response,
        ):
            events = response.iter_lines()
            next(events)
            up.process.send_signal(signal.SIGINT)
            assert [event for event in events if event][-1] == "data: [DONE]"
            assert up.wait_for_end() == 0
            assert connection.recv(1) == b""
            notice = "Shutting down: 1 answer is still running. Ctrl-C again stops at once."
            assert (notice in up.lines, up.lines[-1]) == (True, "Ended.")


def test_a_killed_worker_is_restarted_with_its_counts_and_ends_with_its_gateway(up) -> None:
    """The last test of this file, because it kills the gateway."""
    body = text_body(up.model, "Hello!", temperature=0, draft_tokens=2)
    before = httpx.get(f"{up.url}/v1/status", timeout=60).json()
    assert httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60).is_success
    first = httpx.get(f"{up.url}/v1/status", timeout=60).json()
    os.kill(up.worker_pid(), signal.SIGKILL)
    up.wait_for(READY_AGAIN)
    assert up.worker_pid(boot=2) != up.worker_pid(boot=1)
    assert httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60).is_success
    second = httpx.get(f"{up.url}/v1/status", timeout=60).json()
    (worker,) = up.workers()
    with connection_to(worker["url"]) as connection:
        up.process.kill()
        assert connection.recv(1) == b"", "the worker ends with its gateway"
    requests, attempted = (
        [count(status) for status in (before, first, second)]
        for count in (
            lambda status: status["pools"]["text-mtp"]["requests"],
            lambda status: status["mtp"]["attempted"],
        )
    )
    assert (requests[1], requests[2]) == (requests[0] + 1, requests[0] + 2)
    assert attempted[2] - attempted[1] == attempted[1] - attempted[0] > 0
