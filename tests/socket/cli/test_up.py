"""`paceline up`: the ready message, to whom it shows the join token, and its supervisor."""

import asyncio
import errno
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import SecretStr

from gateway.cli import up
from gateway.cli.supervisor import Supervisor
from gateway.cli.up import _WorkerRunner
from gateway.config.startup_checks import network_url
from gateway.server import Listening
from paceline.addresses import is_loopback
from paceline.command_line import is_own
from paceline.protocol import READY_PREFIX, START_PREFIX, StartProgress, StartStage
from tests.support.running_gateway import make_settings
from tests.support.scripted_worker import JOIN_TOKEN


def make_runner(
    state_dir: Path, *flags: str, host: str = "127.0.0.1", port: int = 8000, keyed: bool = False
) -> _WorkerRunner:
    place = {"host": host, "port": port, "join_token": None}
    given = make_settings(state_dir).model_copy(update=place)
    settings = given.model_copy(update={"join_token": SecretStr(JOIN_TOKEN)})
    listening = Listening(f"http://{host}:{port}", "", keyed, settings, lambda: 0)
    return _WorkerRunner(given=given, worker_flags=flags, listening=listening)


def message(state_dir: Path, *flags: str, **place: Any) -> str:
    return make_runner(state_dir, *flags, **place)._ready_message("demo")


def test_its_commands_ask_a_question_find_this_gateway_and_open_it_for_another_mac(
    tmp_path: Path,
) -> None:
    text = message(tmp_path)
    assert text.index(" ask ") < text.index("curl http://127.0.0.1:8000/v1/chat/completions")
    assert "keys create NAME" in text
    assert "up --host 0.0.0.0" in text
    assert "--join" not in text, "the gateway is not open yet"
    assert "--url" not in text
    text = message(tmp_path, "--model", "Qwen/Qwen3.5-4B", port=8100)
    assert 'ask "Count from 1 to 20." --url http://127.0.0.1:8100' in text
    assert "keys create NAME --url http://127.0.0.1:8100" in text
    assert "up --host 0.0.0.0 --port 8100 --model Qwen/Qwen3.5-4B" in text
    text = message(tmp_path, keyed=True)
    assert "PACELINE_API_KEY=pk-... " in text
    assert '-H "authorization: Bearer $PACELINE_API_KEY"' in text
    assert "keys create" not in text, "it needs no first one"


@pytest.mark.parametrize(
    ("script", "command"),
    [("{}/bin/paceline", "bin/paceline ask "), ("{}/gateway/__main__.py", "    paceline ask ")],
)
def test_it_names_a_command_that_the_shell_does_not_find(
    tmp_path, monkeypatch, script, command
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", [script.format(tmp_path), "up"])
    assert command in message(tmp_path)


def test_l9_an_open_gateway_prints_the_token_on_a_terminal_alone(tmp_path, monkeypatch) -> None:
    text = message(tmp_path, host="0.0.0.0", keyed=True)
    assert "    PACELINE_JOIN_TOKEN=TOKEN " in text
    assert " worker --join http://" in text
    assert "--join http://0.0.0.0" not in text
    assert "--token" not in text, "`ps` shows arguments"
    assert JOIN_TOKEN not in text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert f"    PACELINE_JOIN_TOKEN={JOIN_TOKEN} " in message(tmp_path, host="0.0.0.0", keyed=True)


def test_without_a_default_route_others_are_given_an_address_of_this_machine(monkeypatch) -> None:
    def connect(_socket: socket.socket, _address: object) -> None:
        raise OSError(errno.ENETUNREACH, "no route")

    monkeypatch.setattr(socket.socket, "connect", connect)
    host = urlsplit(network_url("0.0.0.0", 8000)).hostname or ""
    monkeypatch.undo()
    assert is_own(host)
    assert not is_loopback(host)


async def test_it_is_not_ready_while_its_worker_is_cordoned_and_says_who_has_done_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = {"worker_id": "mac", "url": "http://mac:1", "model": "demo"}
    authors = iter(["ann", "ann", ""])
    runner = make_runner(tmp_path)

    def respond(_: httpx.Request) -> httpx.Response:
        said = capsys.readouterr().out
        assert "Paceline is ready" not in said
        lines.append(said)
        return httpx.Response(200, json={**ready, "cordoned_by": next(authors)})

    lines: list[str] = []
    monkeypatch.setattr(up, "_CORDON_POLL_S", 0)
    transport = httpx.MockTransport(respond)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as client:
        await runner._greet(client, ready)
    assert "The worker gets no requests: ann has cordoned it." in "".join(lines)
    assert "".join(lines).count("cordoned") == 1
    assert "Paceline is ready on" in capsys.readouterr().out


async def test_the_stages_of_a_start_are_passed_on_until_the_worker_is_ready() -> None:
    """A line that is no progress is left out, and the other output is printed."""
    lines: list[str] = []
    steps: list[StartProgress | None] = []
    ready = asyncio.Event()

    async def on_ready(_: Mapping[str, Any]) -> None:
        ready.set()

    async def on_exit() -> None:
        """Do nothing."""

    progress = StartProgress(stage=StartStage.KERNELS, done=1, total=3)
    output = (START_PREFIX + progress.model_dump_json(), START_PREFIX + "{", "a line", READY_PREFIX)
    # Its input stays open until it is stopped.
    program = f"print(*{output!r}, sep='\\n', end='{{}}\\n', flush=True); input()"
    running = asyncio.create_task(
        Supervisor(
            command=(sys.executable, "-c", program),
            environment={},
            on_ready=on_ready,
            on_exit=on_exit,
            on_progress=steps.append,
            print_line=lambda _: None,
            print_worker_line=lines.append,
        ).run()
    )
    async with asyncio.timeout(30):
        await ready.wait()
    assert (steps, lines) == ([progress, None], ["a line"])
    running.cancel()
    await asyncio.wait({running})
