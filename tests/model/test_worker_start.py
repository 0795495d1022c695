"""The start of a worker is told: to its gateways, to its parent process, and in a terminal."""

import asyncio
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import Response
from rich.console import Console

from paceline.protocol import READY_PREFIX, START_PREFIX, ExitCode, StartProgress, StartStage
from paceline.terminal import StartDisplay
from tests.model.test_worker_heartbeat import Gateway
from tests.support.scripted_engine import serve_app
from tests.support.worker_process import environment_without_paceline, worker_process
from workers.demo import CHECKPOINT
from workers.server.main import read_settings
from workers.server.start import start

WAIT_S = 120
_COMMIT = "0" * 40


def model_hub(folder: Path, release: asyncio.Event) -> FastAPI:
    """Return an application whose every repository has the files of a folder.

    It sends the weights when they are released.
    """
    app = FastAPI()
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    files["modeling.py"] = b"raise SystemExit"

    @app.get("/api/models/{owner}/{name}/revision/{revision}")
    async def describe(owner: str, name: str) -> dict[str, object]:
        siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
        return {"id": f"{owner}/{name}", "sha": _COMMIT, "private": False, "siblings": siblings}

    @app.get("/api/models/{owner}/{name}/tree/{revision}")
    async def list_files() -> list[dict[str, object]]:
        return [
            {"type": "file", "oid": "1" * 40, "size": len(data), "path": file}
            for file, data in files.items()
        ]

    @app.api_route("/{owner}/{name}/resolve/{revision}/{file}", methods=["GET", "HEAD"])
    async def resolve(request: Request, file: str) -> Response:
        headers = {"x-repo-commit": _COMMIT, "etag": f'"{file}"'}
        if request.method == "HEAD":
            return Response(headers={**headers, "content-length": str(len(files[file]))})
        if file.endswith(".safetensors"):
            await release.wait()
        return Response(files[file], headers=headers)

    return app


async def test_a_worker_tells_its_gateway_and_its_parent_how_far_its_start_is(tmp_path) -> None:
    """From the bytes of the download on, under one boot, until it is ready and leaves."""
    gateway, release = Gateway(interval_s=0.02), asyncio.Event()
    hub = model_hub(CHECKPOINT, release)
    async with serve_app(gateway.app()) as url, serve_app(hub) as hub_url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workers", "--model", "owner/model", "--port", "0"),
            *("--join", url, "--leash", "--id", "studio", "--label", "big"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment_without_paceline()
            | {"HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path), "PACELINE_JOIN_TOKEN": "secret"},
        )
        assert process.stdout
        assert process.stdin
        told: list[StartProgress] = []
        async with asyncio.timeout(WAIT_S):
            while not (line := (await process.stdout.readline()).decode()).startswith(READY_PREFIX):
                assert line, "the worker ended before it was ready"
                if line.startswith(START_PREFIX):
                    told.append(StartProgress.model_validate_json(line[len(START_PREFIX) :]))
                    if told[-1].done:  # of the small files, before the weights
                        release.set()
            await gateway.reports_reach(len(gateway.reports) + 2)
            async with httpx.AsyncClient(base_url=gateway.reports[-1].url, timeout=60) as client:
                assert (await client.get("/v1/status")).status_code == 401
            process.stdin.close()
            assert await process.wait() == 0
    assert gateway.removed == ["studio"]
    stages = [stage for stage, _ in itertools.groupby(progress.stage for progress in told)]
    assert stages[:2] == [StartStage.DOWNLOAD, StartStage.WEIGHTS]
    assert stages == [stage for stage in StartStage if stage in stages]
    starting = [report for report in gateway.reports if report.start]
    assert max(report.start.done for report in starting if report.start) > 0
    assert not any(report.ready or report.lanes for report in starting)
    assert gateway.reports[-1].lanes
    (boot,) = {(one.boot_id, one.url, one.model, one.labels) for one in gateway.reports}
    assert boot[1:] == (json.loads(line[len(READY_PREFIX) :])["url"], "owner/model", ("big",))
    assert "modeling.py" not in {path.name for path in _files(tmp_path)}, "it downloads no code"


def _files(folder: Path) -> list[Path]:
    return [*folder.rglob("*")]


def test_kernels_are_kept_in_the_state_folder_unless_a_folder_is_named(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path))
    settings = read_settings(["--model", "one word", "--port", "0"])
    for named, kept in ((None, str(tmp_path / "kernels")), ("/named", "/named")):
        monkeypatch.setenv("TMPDIR", named or "")
        if named is None:
            del os.environ["TMPDIR"]
        assert start(settings) == ExitCode.MODEL
        assert os.environ.get("TMPDIR") == (kept if sys.platform == "linux" or named else None)


def test_ctrl_c_during_the_start_ends_the_worker_at_once(tmp_path: Path) -> None:
    arguments = ("--model", str(CHECKPOINT), "--port", "0", "--leash")
    with worker_process(*arguments, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(START_PREFIX)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130


def progress(stage: StartStage, elapsed_s: float, done: int = 0, total: int = 0) -> StartProgress:
    return StartProgress(stage=stage, done=done, total=total, elapsed_s=elapsed_s)


def test_a_log_gets_a_line_for_each_stage_and_every_eight_seconds() -> None:
    output = io.StringIO()
    display = StartDisplay(output)
    for elapsed_s in range(18):
        display.show(progress(StartStage.WEIGHTS, elapsed_s))
    display.show(progress(StartStage.KERNELS, 18.2, 1, 3))
    display.show(progress(StartStage.KERNELS, 19.2, 2, 3))
    display.close()
    assert output.getvalue().splitlines() == [
        "Starting: loading the weights (0 s) ...",
        "Starting: loading the weights (8 s) ...",
        "Starting: loading the weights (16 s) ...",
        "Starting: compiling kernels, 1 of 3 (18 s) ...",
    ]


def test_a_terminal_gets_a_bar_that_is_gone_after_the_start(monkeypatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    display = StartDisplay(console)
    display.show(progress(StartStage.DOWNLOAD, 5, 1_500_000_000, 3_000_000_000))
    display.show(progress(StartStage.DOWNLOAD, 6, 3_000_000_000, 3_000_000_000))
    display.close()
    shown = output.getvalue()
    assert "downloading the model, 3.0 of 3.0 GB (6 s)" in shown
    assert "━" in shown
    assert shown.endswith("\x1b[2K"), "the bar erases itself"


def test_a_download_shows_its_recent_speed() -> None:
    output = io.StringIO()
    display = StartDisplay(output)
    shown = ((0, 500_000_000), (8, 900_000_000), (16, 1_700_000_000), (24, 1_700_000_000))
    for elapsed_s, done in shown:
        display.show(progress(StartStage.DOWNLOAD, elapsed_s, done, 2_000_000_000))
    assert output.getvalue().splitlines() == [
        "Starting: downloading the model, 0.5 of 2.0 GB (0 s) ...",
        "Starting: downloading the model, 0.9 of 2.0 GB (8 s), 50.0 MB/s ...",
        "Starting: downloading the model, 1.7 of 2.0 GB (16 s), 100.0 MB/s ...",
        "Starting: downloading the model, 1.7 of 2.0 GB (24 s) ...",
    ]
