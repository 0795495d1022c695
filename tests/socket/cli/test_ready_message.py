"""The ready message of `paceline up`: what it offers, and to whom it shows the join token."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.cli.up import _WorkerRunner
from gateway.server import Listening
from tests.support.running_gateway import make_settings
from tests.support.scripted_worker import JOIN_TOKEN


def message(
    state_dir: Path, *flags: str, host: str = "127.0.0.1", port: int = 8000, keyed: bool = False
) -> str:
    given = make_settings(state_dir).model_copy(
        update={"host": host, "port": port, "join_token": None}
    )
    settings = given.model_copy(update={"join_token": SecretStr(JOIN_TOKEN)})
    listening = Listening(f"http://{host}:{port}", "", keyed, settings, lambda: 0)
    return _WorkerRunner(given=given, worker_flags=flags, listening=listening)._ready_message(
        "demo"
    )


def test_it_begins_with_a_question_and_the_join_command_waits_for_an_open_gateway(
    tmp_path: Path,
) -> None:
    text = message(tmp_path)
    assert text.index(" ask ") < text.index("curl http://127.0.0.1:8000/v1/chat/completions")
    assert "keys create NAME" in text
    assert "up --host 0.0.0.0" in text
    assert "--join" not in text


def test_its_commands_find_this_gateway_and_restart_the_same_model(tmp_path: Path) -> None:
    text = message(tmp_path, "--model", "Qwen/Qwen3.5-4B", port=8100)
    assert 'ask "Count from 1 to 20." --url http://127.0.0.1:8100' in text
    assert "keys create NAME --url http://127.0.0.1:8100" in text
    assert "up --host 0.0.0.0 --port 8100 --model Qwen/Qwen3.5-4B" in text
    assert "--url" not in message(tmp_path)


def test_with_a_key_it_needs_no_first_one_and_the_commands_send_one(tmp_path: Path) -> None:
    text = message(tmp_path, keyed=True)
    assert "PACELINE_API_KEY=pk-... " in text
    assert '-H "authorization: Bearer $PACELINE_API_KEY"' in text
    assert "keys create" not in text


def test_l9_an_open_gateway_prints_the_token_on_a_terminal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = message(tmp_path, host="0.0.0.0", keyed=True)
    assert " worker --join http://" in text
    assert "--join http://0.0.0.0" not in text
    assert " --token TOKEN " in text
    assert JOIN_TOKEN not in text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert f" --token {JOIN_TOKEN} " in message(tmp_path, host="0.0.0.0", keyed=True)
