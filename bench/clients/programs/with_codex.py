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
from collections.abc import Iterator
from pathlib import Path

from bench.clients.cases import (
    API,
    HELLO,
    KEY,
    LIMITED_KEY,
    MODEL,
    ONCE,
    OVERFLOW,
    SLOWLY,
    Mode,
    case,
    check,
    leave,
    main,
    requests_running,
    wait_until,
)

_TIMEOUT_S = 900.0
_CONFIG = f"""\
model = "{MODEL}"
model_provider = "paceline"

[model_providers.paceline]
name = "Paceline"
base_url = "{API}"
wire_api = "responses"
env_key = "PACELINE_KEY"
"""


@contextlib.contextmanager
def running(question: str, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    """Run `codex exec` in this folder, which is its home."""
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(_CONFIG)
    words = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    process = subprocess.Popen(
        [*words, "-"],
        env={"PATH": os.environ["PATH"], "HOME": str(Path.home()), "PACELINE_KEY": key},
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
    check(HELLO in printed, printed[-300:])
    return HELLO


@case("runs a command and tells its result", ONCE)
def tools(_mode: Mode) -> str:
    printed = codex("CALL echo and tell me what it printed.")
    check("The tool said:" in printed and "paceline-42" in printed, printed[-300:])
    return "it ran `echo`, and the model got its output"


@case("is interrupted: the worker stops", ONCE)
def interrupted(_mode: Mode) -> str:
    def interrupt() -> None:
        with running(SLOWLY) as process:
            wait_until(lambda: requests_running() > 0)
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=_TIMEOUT_S)

    return leave(interrupt)


@case("meets a rate limit", ONCE)
def limited(_mode: Mode) -> str:
    codex("Say hello.", LIMITED_KEY)
    printed = codex("Say hello.", LIMITED_KEY)
    check("Reconnecting" in printed and HELLO in printed, printed[-300:])
    return "waited as long as `retry-after` says, then got its answer"


@case("meets the end of the context", ONCE)
def overflow(_mode: Mode) -> str:
    printed = codex(OVERFLOW)
    check("ran out of room in the model's context window" in printed, printed[-300:])
    return "ran out of room in the model's context window"


if __name__ == "__main__":
    main()
