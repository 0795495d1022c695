# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.169.0"]
# scripted = true
# ///
"""Codex, on Responses: it answers, runs a command, is interrupted, and meets limits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.clients.cases import (
    API,
    KEY,
    LIMITED_KEY,
    MODEL,
    ONCE,
    Mode,
    case,
    check,
    clients_left,
    main,
    requests_running,
    wait_until,
)

_CONFIG = f"""\
model = "{MODEL}"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{API}"
wire_api = "responses"
env_key = "PACELINE_KEY"
"""
_TIMEOUT_S = 120.0


@contextlib.contextmanager
def running(question: str, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    """Run `codex exec` in a new home."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / ".codex"
        folder.mkdir()
        (folder / "config.toml").write_text(_CONFIG)
        words = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-"]
        environment = {"PATH": os.environ["PATH"], "HOME": home, "PACELINE_KEY": key}
        process = subprocess.Popen(
            words,
            cwd=home,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(question)
        process.stdin.close()
        process.stdin = None
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def codex(question: str, key: str = KEY) -> str:
    """Return what Codex prints."""
    with running(question, key) as process:
        return process.communicate(timeout=_TIMEOUT_S)[0]


@case("answers", ONCE)
def answers(_mode: Mode) -> str:
    printed = codex("Say hello.")
    check("Hello from the script." in printed, printed[-300:])
    return "Hello from the script."


@case("runs a command and tells its result", ONCE)
def tools(_mode: Mode) -> str:
    printed = codex("CALL echo and tell me what it printed.")
    check("The tool said:" in printed and "paceline-42" in printed, printed[-300:])
    return "it ran `echo`, and the model got its output"


@case("is interrupted: the worker stops", ONCE)
def interrupted(_mode: Mode) -> str:
    before = clients_left()
    with running("Answer SLOWLY.") as process:
        wait_until(lambda: requests_running() > 0)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=_TIMEOUT_S)
    wait_until(lambda: clients_left() > before)
    return "the gateway cancelled the request at its worker"


@case("meets a rate limit", ONCE)
def limited(_mode: Mode) -> str:
    codex("Say hello.", LIMITED_KEY)
    printed = codex("Say hello.", LIMITED_KEY)
    check("Reconnecting" in printed and "Hello from the script." in printed, printed[-300:])
    return "waited as long as `retry-after` says, then got its answer"


@case("meets the end of the context", ONCE)
def overflow(_mode: Mode) -> str:
    printed = codex("word " * 40_000)
    check("ran out of room in the model's context window" in printed, printed[-300:])
    return "ran out of room in the model's context window"


if __name__ == "__main__":
    main()
