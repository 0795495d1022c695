# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.171.0"]
# scripted = true
# ///
"""Codex, on Responses: it answers, runs a command, is interrupted, and meets limits."""

from bench.clients import cases
from bench.clients.agents import codex, configure_codex

CODEX = codex()


def says(question: str, *expected: str, result: str, key: str = cases.KEY) -> str:
    printed = CODEX.ask(question, key)
    cases.check(all(text in printed for text in expected), printed[-300:])
    return result


@cases.once("answers")
def answers() -> str:
    return says("Say hello.", cases.HELLO, result=cases.HELLO)


@cases.once("runs a command and tells its result")
def tools() -> str:
    question = "CALL echo and tell me what it printed."
    result = "it ran `echo`, and the model got its output"
    return says(question, "The tool said:", "paceline-42", result=result)


cases.once("is interrupted: the worker stops")(CODEX.interrupt)


@cases.once("meets a rate limit")
def limited() -> str:
    key = cases.LIMITED_KEY
    CODEX.ask("Say hello.", key)
    waited = "waited as long as `retry-after` says, then got its answer"
    return says("Say hello.", "Reconnecting", cases.HELLO, result=waited, key=key)


@cases.once("meets the end of the context")
def overflow() -> str:
    full = "ran out of room in the model's context window"
    return says(cases.OVERFLOW, full, result=full)


if __name__ == "__main__":
    configure_codex()
    cases.main()
