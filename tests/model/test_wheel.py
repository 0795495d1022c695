"""The wheel, installed by uv into an empty environment: `paceline up` serves as in a clone."""

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from paceline.installation import commit_of
from tests.support.paceline_process import READY, TIMEOUT_S, UpProcess
from tests.support.pdfs import base64_pdf, pdf
from tests.support.wheel import (
    ROOT,
    VERSION,
    bare_environment,
    build_wheel,
    install_wheel,
)

BLAS = [*Path("/usr/lib").glob("*/openblas-pthread/libblas.so.3")]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """Install the wheel; return its command `paceline`."""
    folder = tmp_path_factory.mktemp("wheel")
    return install_wheel(build_wheel(folder / "dist"), folder / "env")


@pytest.fixture(scope="module")
def up(program, tmp_path_factory) -> Iterator[UpProcess]:
    """Run `paceline up` in a folder that only has files named as packages."""
    folder = tmp_path_factory.mktemp("folder")
    for name in ("gateway", "workers", "paceline", "click", "json", "mlx"):
        (folder / f"{name}.py").write_text("raise SystemExit('not this one')")
    with subprocess.Popen(
        [program, "up", "--port", "0"],
        cwd=folder,
        env=bare_environment() | {"PACELINE_STATE_DIR": str(folder / "state")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield UpProcess(process, folder / "state")
            process.send_signal(signal.SIGINT)
            process.wait(TIMEOUT_S)
        finally:
            process.kill()


def test_the_version_of_the_wheel_names_the_commit_that_it_was_built_from(program: Path) -> None:
    printed = subprocess.run(
        [program, "--version"],
        cwd="/",
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == f"paceline {VERSION} ({commit_of(ROOT)})\n"


def test_paceline_up_from_the_wheel_answers_and_serves_its_pages(up, program: Path) -> None:
    asked = subprocess.run(
        [program, "ask", "Count from 1 to 20.", "--url", up.url],
        cwd=up.state_dir.parent,
        env=bare_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.startswith("1, 2, 3, 4")
    for page in ("/", "/dashboard", "/try", "/admin", "/docs"):
        assert httpx.get(up.url + page, timeout=60).status_code == 200


def test_the_processes_of_the_wheel_import_nothing_from_the_folder_that_they_run_in(
    up, program
) -> None:
    """Those that read a PDF and try a grammar too."""
    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": base64_pdf(pdf("Hello"))}}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {
        "model": up.model,
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "max_tokens": 40,
    }
    answer = httpx.post(f"{up.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    command = [program, "doctor", "--help"]
    folder = up.state_dir.parent
    assert subprocess.run(command, cwd=folder, env=bare_environment(), check=True)


@pytest.mark.skipif(not BLAS, reason="OpenBLAS is not installed")
def test_its_worker_computes_with_openblas(up: UpProcess) -> None:
    assert str(BLAS[0].resolve()) in Path(f"/proc/{up.worker_pid()}/maps").read_text()


def test_f35_a_restart_ends_its_streams_first_and_lets_new_connections_wait(up: UpProcess) -> None:
    body = {
        "model": up.model,
        "messages": [{"role": "user", "content": "Count from 1 to 60."}],
        "temperature": 0,
        "stream": True,
    }
    path = f"{up.url}/v1/chat/completions"
    with httpx.stream("POST", path, json=body, timeout=TIMEOUT_S) as stream:
        events = stream.iter_text()
        received = next(events)
        up.process.send_signal(signal.SIGUSR2)
        begun_s = time.monotonic()
        up.wait_for(r"^Shutting down")
        with ThreadPoolExecutor() as others:
            waiting = others.submit(httpx.get, f"{up.url}/v1/status", timeout=TIMEOUT_S)
            received += "".join(events)
            uptime_s = waiting.result().json()["gateway"]["uptime_s"]
            assert uptime_s < time.monotonic() - begun_s, "it is an answer of the new process"
    assert received.endswith("data: [DONE]\n\n")
    assert up.wait_for(READY, times=2)[1] == up.url
