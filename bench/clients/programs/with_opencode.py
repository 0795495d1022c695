# /// script
# [tool.paceline]
# npm = ["opencode-ai@1.18.33"]
# scripted = true
# ///
"""opencode, on chat, Responses and Messages: a loop of its tools, an interrupt, and limits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench.clients.cases import (
    CALL,
    HELLO,
    LIMITED_KEY,
    ONCE,
    OVERFLOW,
    Mode,
    case,
    check,
    main,
)
from bench.clients.opencode import PACKAGES, agent, configure


def tools(wire: str, _mode: Mode) -> str:
    Path("note.txt").write_text("the secret is 42")
    printed = agent(wire).ask(CALL)
    check("The tool said:" in printed and "paceline-42" in printed, printed[-300:])
    return "it read a file, ran `echo`, and the model got its output"


def interrupted(wire: str, _mode: Mode) -> str:
    return agent(wire).interrupt()


for _wire in PACKAGES:
    case(f"{_wire}: reads a file, runs a command, answers", ONCE)(partial(tools, _wire))
    case(f"{_wire}: is interrupted: the worker stops", ONCE)(partial(interrupted, _wire))


@case("meets a rate limit", ONCE)
def limited(_mode: Mode) -> str:
    printed = agent("chat").ask("Say hello.", LIMITED_KEY)
    check(HELLO in printed, printed[-300:])
    return "waited as long as `retry-after` says, then got its answer"


@case("meets the end of the context", ONCE)
def overflow(_mode: Mode) -> str:
    printed = agent("chat").ask(OVERFLOW)
    check("maximum context length is" in printed, printed[-300:])
    return "shows the gateway's error: maximum context length"


if __name__ == "__main__":
    configure()
    main()
