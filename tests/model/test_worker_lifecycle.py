"""Start and shutdown of a worker process, and errors at its start."""

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.lifecycle import Shutdown
from paceline.protocol import READY_PREFIX, START_PREFIX
from tests.support.gateway_fixtures import remove_settings
from tests.support.scripted_engine import ScriptedEngine, make_worker
from tests.support.worker_process import (
    STOP_TIMEOUT_S,
    SUPPRESS_END_TOKENS,
    WorkerProcess,
    run_worker,
    running_worker,
    worker_process,
)
from workers.demo import CHECKPOINT
from workers.server.main import read_settings
from workers.server.server import serve
from workers.server.start import start

LONG = "The red fox sees the old tree. " * 45 + "What does the fox see?"

STORY = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "logit_bias": SUPPRESS_END_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def test_a_server_whose_engine_failed_returns_false() -> None:
    engine = ScriptedEngine()

    def fail() -> None:
        engine.alive = False

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        worker, shutdown = make_worker(engine), Shutdown()
        assert not await serve(worker, listener, token=None, shutdown=shutdown, on_ready=fail)


Start = Callable[..., tuple[int, str]]


@pytest.fixture
def start_in_vain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Return a function that starts a worker here; it returns the exit code and the errors."""
    remove_settings(monkeypatch)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # as the start sets it

    def run(*arguments: str) -> tuple[int, str]:
        return start(read_settings(arguments)), capsys.readouterr().err

    return run


def test_a_used_port_is_reported_in_one_line_before_the_weights_load(start_in_vain: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = str(occupied.getsockname()[1])
        code, errors = start_in_vain("--model", "/nowhere", "--port", port)
    assert code == 2
    assert errors.startswith(f"paceline worker: Cannot listen on 127.0.0.1 port {port}")
    assert errors.count("\n") == 1


def test_a_port_that_is_opened_while_the_weights_load_ends_the_worker_with_one_line() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = str(other.getsockname()[1])
        arguments = ("--model", str(CHECKPOINT), "--port", port, "--leash", "--draft-tokens", "0")
        with worker_process(*arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith(START_PREFIX), "it has bound the port"
            other.listen()
            output, errors = process.stdout.read(), process.stderr.read()
            assert process.wait(STOP_TIMEOUT_S) == 2
    assert READY_PREFIX not in output
    assert f"Cannot listen on 127.0.0.1 port {port}: " in errors.splitlines()[-1]


@pytest.mark.parametrize("files", [(), ("config.json",)], ids=["an empty folder", "no weights"])
def test_a_folder_without_a_model_is_reported_in_one_line(start_in_vain, tmp_path, files) -> None:
    for file in files:
        (tmp_path / file).write_text("{}")
    code, errors = start_in_vain("--model", str(tmp_path), "--port", "0")
    assert code == 3
    assert errors.startswith("paceline worker: ")
    assert str(tmp_path) in errors
    assert errors.count("\n") == 1


def test_a_missing_model_is_reported_without_a_traceback_before_mlx_is_imported() -> None:
    listing = {"PYTHONPROFILEIMPORTTIME": "1"}
    result = run_worker("--model", "no such model", "--port", "0", environment=listing)
    assert result.returncode == 3
    assert "no such model" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "workers.settings" in imported
    assert imported.isdisjoint({"mlx", "mlx_vlm", "transformers"}), "they take seconds"


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """Run a worker with flags, which the last test ends."""
    sparse = ("--spec-prefill", str(CHECKPOINT), "--spec-prefill-threshold", "300")
    with running_worker("--lanes", "vlm,text-mtp", "--draft-tokens", "1", *sparse) as process:
        yield process


def test_a_worker_applies_its_flags(worker: WorkerProcess) -> None:
    assert worker.lanes == ("vlm", "text-mtp")
    assert "It drafts 1 token ahead." in worker.start_lines[-1]
    assert "From 300 tokens on, 30% of a prompt are read" in worker.start_lines[-1]


def test_a_worker_with_a_draft_model_reads_a_long_prompt_sparsely_and_counts_it(worker) -> None:
    with httpx.Client(base_url=worker.url, timeout=60) as client:
        body = {
            "model": worker.model,
            "messages": [{"role": "user", "content": LONG}],
            "temperature": 0,
            "max_tokens": 4,
        }
        sparse = client.post("/v1/chat/completions", json=body).json()["usage"]
        full = client.post("/v1/chat/completions", json=body | {"specprefill": False})
        report = client.get("/v1/status").json()["lanes"]["text-mtp"]["spec_prefill"]
        metrics = client.get("/metrics").text

    skipped = sparse["prompt_tokens_details"]["skipped_tokens"]
    assert sparse["prompt_tokens"] == full.json()["usage"]["prompt_tokens"] > skipped > 200
    assert report == {
        "prompts": 1,
        "scored_tokens": sparse["prompt_tokens"],
        "selected_tokens": sparse["prompt_tokens"] - skipped,
        "full_prefills": {"switched_off": 1},
    }
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.labels.get("lane") == "text-mtp"
    }
    assert values["paceline_worker_spec_prefill_prompts_total"] == 1
    assert values["paceline_worker_spec_prefill_full_prefills_total"] == 1


def test_after_sigterm_streams_finish_until_a_second_signal_ends_them(worker) -> None:
    """The last test of this file, because it ends the worker."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=worker.url, timeout=60))

        def begin_story(max_tokens: int) -> Iterator[str]:
            body = {"model": worker.model, **STORY, "max_tokens": max_tokens}
            stream = client.stream("POST", "/v1/chat/completions", json=body)
            events = (line for line in stack.enter_context(stream).iter_lines() if line)
            next(events)
            return events

        endless, story = begin_story(20_000), begin_story(100)
        worker.process.send_signal(signal.SIGTERM)
        while client.get("/readyz").status_code != 503:
            pass
        rejected = client.post("/v1/chat/completions", json={"model": worker.model, **STORY})
        assert (rejected.status_code, rejected.headers["retry-after"]) == (503, "1")
        rest = list(story)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 100
        worker.process.send_signal(signal.SIGTERM)
        with pytest.raises(httpx.RemoteProtocolError):
            list(endless)
        assert worker.process.wait(STOP_TIMEOUT_S) == 0
