# /// script
# [tool.paceline]
# npm = ["opencode-ai@1.18.33"]
# scripted = true
# ///
"""opencode, on chat, Responses and Messages: a loop of its tools, an interrupt, and limits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.clients.cases import (
    API,
    CALL,
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

_TIMEOUT_S = 300.0
PACKAGES = {
    "chat": "@ai-sdk/openai-compatible",
    "responses": "@ai-sdk/openai",
    "messages": "@ai-sdk/anthropic",
}
"""The packages inside opencode that speak each wire."""


def provider(wire: str) -> dict[str, object]:
    return {
        "npm": PACKAGES[wire],
        "name": f"Paceline ({wire})",
        "options": {"baseURL": API, "apiKey": "{env:PACELINE_KEY}"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": 32_768, "output": 4_096}}},
    }


CONFIG = {
    "$schema": "https://opencode.ai/config.json",
    "provider": {f"paceline-{wire}": provider(wire) for wire in PACKAGES},
    "autoupdate": False,
    "share": "disabled",
}


@contextlib.contextmanager
def running(question: str, wire: str, key: str = KEY) -> Iterator[subprocess.Popen[str]]:
    """Run `opencode run` in this folder."""
    Path("opencode.json").write_text(json.dumps(CONFIG))
    process = subprocess.Popen(
        ["opencode", "run", "--model", f"paceline-{wire}/{MODEL}"],
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


def opencode(question: str, wire: str, key: str = KEY) -> str:
    """Return what opencode prints."""
    with running(question, wire, key) as process:
        return process.communicate(timeout=_TIMEOUT_S)[0]


def tools(wire: str, _mode: Mode) -> str:
    Path("note.txt").write_text("the secret is 42")
    printed = opencode(CALL, wire)
    check("The tool said:" in printed and "paceline-42" in printed, printed[-300:])
    return "it read a file, ran `echo`, and the model got its output"


def interrupted(wire: str, _mode: Mode) -> str:
    def interrupt() -> None:
        with running(SLOWLY, wire) as process:
            wait_until(lambda: requests_running() > 0)
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=_TIMEOUT_S)

    return leave(interrupt)


for _wire in PACKAGES:
    case(f"{_wire}: reads a file, runs a command, answers", ONCE)(partial(tools, _wire))
    case(f"{_wire}: is interrupted: the worker stops", ONCE)(partial(interrupted, _wire))


@case("meets a rate limit", ONCE)
def limited(_mode: Mode) -> str:
    printed = opencode("Say hello.", "chat", LIMITED_KEY)
    check(HELLO in printed, printed[-300:])
    return "waited as long as `retry-after` says, then got its answer"


@case("meets the end of the context", ONCE)
def overflow(_mode: Mode) -> str:
    printed = opencode(OVERFLOW, "chat")
    check("maximum context length is exceeded" in printed, printed[-300:])
    return "shows the gateway's error: maximum context length is exceeded"


if __name__ == "__main__":
    main()
