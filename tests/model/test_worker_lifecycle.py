"""The start of a worker process, errors at its start, and its shutdown."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import httpx
import pytest

from tests.support.scripted_engine import ScriptedEngine, make_worker
from tests.support.worker_process import (
    STOP_TIMEOUT_S,
    SUPPRESS_END_TOKENS,
    run_worker,
    running_worker,
    wait_until_ready,
    worker_process,
)
from workers.config_file import InvalidSettings
from workers.demo import CHECKPOINT
from workers.lifecycle import Shutdown
from workers.server.server import serve

STORY = {
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "temperature": 0,
    "max_tokens": 400,
    "logit_bias": SUPPRESS_END_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def test_sigterm_lets_streams_finish_and_shows_readyz_503_meanwhile() -> None:
    with running_worker() as worker:
        body = {"model": worker.model, **STORY}
        with (
            httpx.Client(base_url=worker.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as stream,
        ):
            events = (line for line in stream.iter_lines() if line)
            next(events)
            worker.process.send_signal(signal.SIGTERM)
            while client.get("/readyz").status_code != 503:
                pass
            refused = client.post("/v1/chat/completions", json=body)
            rest = list(events)
        worker.process.wait(STOP_TIMEOUT_S)
        assert refused.status_code == 503
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 400
        assert worker.process.returncode == 0


def test_second_signal_does_not_wait_for_streams() -> None:
    with running_worker() as worker:
        body = {"model": worker.model, **STORY, "max_tokens": 20_000}
        with (
            httpx.Client(base_url=worker.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as stream,
        ):
            events = (line for line in stream.iter_lines() if line)
            next(events)
            worker.process.send_signal(signal.SIGTERM)
            while client.get("/readyz").status_code != 503:
                pass
            worker.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                list(events)
        assert worker.process.wait(STOP_TIMEOUT_S) == 0


async def test_worker_whose_engine_died_ends_and_says_so_to_who_started_it() -> None:
    engine = ScriptedEngine()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))

    def die() -> None:
        engine.alive = False

    with listener:
        alive = await serve(
            make_worker(engine),
            listener,
            token=None,
            gateway_url="",
            shutdown=Shutdown(),
            on_ready=die,
        )
    assert not alive


def test_worker_runs_what_its_flags_say_until_its_leash_is_let_go() -> None:
    flags = ("--lanes", "text-mtp", "--draft-tokens", "1", "--leash")
    arguments = ("--model", str(CHECKPOINT), "--port", "0", *flags)
    with worker_process(*arguments, stdin=subprocess.PIPE) as process:
        worker = wait_until_ready(process)
        assert worker.lanes == ("text-mtp",)
        assert "draft tokens: 1 requested, 1 effective" in worker.start_lines[-1]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(STOP_TIMEOUT_S) == 0


def test_taken_port_is_one_sentence_before_any_weights_are_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = run_worker("--model", "/nowhere", "--port", port)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"paceline worker: Cannot listen on 127.0.0.1 port {port}")
    assert ended.stderr.count("\n") == 1


async def test_a_port_that_another_worker_took_while_the_weights_loaded_is_told_of() -> None:
    """Both may bind while neither listens; who listens first has it."""
    first, second = socket.socket(), socket.socket()
    with first, second:
        for one in (first, second):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        host, port = first.getsockname()
        try:
            second.bind((host, port))
        except OSError:
            pytest.skip("this system reports it before the weights load")
        first.listen()
        with pytest.raises(InvalidSettings, match=f"Cannot listen on {host} port {port}: "):
            await serve(
                make_worker(ScriptedEngine()),
                second,
                token=None,
                gateway_url="",
                shutdown=Shutdown(),
                on_ready=lambda: pytest.fail("it takes no requests"),
            )


def test_of_two_workers_started_on_one_port_one_serves_and_the_other_says_why_not() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = ("--model", str(CHECKPOINT), "--port", port)
    with (
        worker_process(*arguments, stderr=subprocess.PIPE) as one,
        worker_process(*arguments, stderr=subprocess.PIPE) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        ends = {pool.submit(process.wait): process for process in (one, two)}
        first = ends.pop(next(as_completed(ends)))
        (other,) = ends.values()
        assert first.stderr is not None
        assert first.returncode == 2
        assert f"Cannot listen on 127.0.0.1 port {port}: " in first.stderr.read().splitlines()[-1]
        assert wait_until_ready(other).url.endswith(port)
        other.terminate()


@pytest.mark.parametrize("model", ["/nowhere", "no such model"])
def test_model_that_is_not_there_is_one_sentence(model: str) -> None:
    ended = run_worker("--model", model, "--port", "0")
    assert ended.returncode == 3
    assert model in ended.stderr
    assert "Traceback" not in ended.stderr


def test_folder_that_is_no_model_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = run_worker("--model", str(tmp_path), "--port", "0")
    assert ended.returncode == 3
    assert "Traceback" not in ended.stderr


def test_listening_beyond_loopback_without_a_token_is_refused() -> None:
    ended = run_worker("--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "join token" in ended.stderr
