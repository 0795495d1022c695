# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.332", "node@22.23.3"]
# scripted = true
# ///
"""Claude Code, on Anthropic's Messages: a loop of its tools, an interrupt, and limits."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from bench.clients.cases import (
    CALL,
    LIMITED_KEY,
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
from bench.clients.claude_code import ask, environment_of

_NOTE = "note.txt"


@case("reads a file, runs a command, answers", ONCE)
def tools(_: Mode) -> str:
    Path(_NOTE).write_text("the secret is 42")
    result = ask(CALL, "--tools", "Read,Bash", "--allowedTools", "Read,Bash")
    check("paceline-42" in result["result"], result["result"])
    check(result["num_turns"] == 3, result["num_turns"])
    return f"{result['num_turns']} turns: {result['result']}"


@case("is interrupted: its request ends", ONCE)
def interrupted(_: Mode) -> str:
    def interrupt() -> None:
        process = subprocess.Popen(
            ["claude", "-p", SLOWLY, "--tools", ""],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment_of(),
        )
        try:
            wait_until(lambda: requests_running() > 0)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)

    return leave(interrupt)


@case("429 of a key with one request a minute", ONCE)
def limited(_: Mode) -> str:
    first, second = (ask("Hello.", "--tools", "", key=LIMITED_KEY) for _ in range(2))
    check(not first["is_error"], first["result"])
    if second["is_error"]:
        check("limit" in second["result"].lower(), second["result"])
        return str(second["result"])
    return f"waited {second['duration_ms'] / 1000:.0f} s, then: {second['result']}"


@case("the context of the model is full", ONCE)
def full(_: Mode) -> str:
    result = ask("Summarise this.", "--tools", "", stdin=OVERFLOW)
    check(result["is_error"] and "too long" in result["result"], result)
    return str(result["result"])


if __name__ == "__main__":
    main()
