# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.171.0"]
# scripted = true
# ///
"""Codex, on Responses: it answers, runs a command, is interrupted, and meets limits."""

from __future__ import annotations

from bench.clients.cases import (
    HELLO,
    LIMITED_KEY,
    ONCE,
    OVERFLOW,
    Mode,
    case,
    check,
    main,
)
from bench.clients.codex import agent, configure

CODEX = agent()


@case("answers", ONCE)
def answers(_mode: Mode) -> str:
    printed = CODEX.ask("Say hello.")
    check(HELLO in printed, printed[-300:])
    return HELLO


@case("runs a command and tells its result", ONCE)
def tools(_mode: Mode) -> str:
    printed = CODEX.ask("CALL echo and tell me what it printed.")
    check("The tool said:" in printed and "paceline-42" in printed, printed[-300:])
    return "it ran `echo`, and the model got its output"


@case("is interrupted: the worker stops", ONCE)
def interrupted(_mode: Mode) -> str:
    return CODEX.interrupt()


@case("meets a rate limit", ONCE)
def limited(_mode: Mode) -> str:
    CODEX.ask("Say hello.", LIMITED_KEY)
    printed = CODEX.ask("Say hello.", LIMITED_KEY)
    check("Reconnecting" in printed and HELLO in printed, printed[-300:])
    return "waited as long as `retry-after` says, then got its answer"


@case("meets the end of the context", ONCE)
def overflow(_mode: Mode) -> str:
    printed = CODEX.ask(OVERFLOW)
    check("ran out of room in the model's context window" in printed, printed[-300:])
    return "ran out of room in the model's context window"


if __name__ == "__main__":
    configure()
    main()
