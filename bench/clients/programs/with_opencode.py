# /// script
# [tool.paceline]
# npm = ["opencode-ai@1.18.33"]
# scripted = true
# ///
"""opencode, on chat, Responses and Messages: a loop of its tools, an interrupt, and limits."""

from pathlib import Path

from bench.clients import cases
from bench.clients.agents import PACKAGES, configure_opencode, opencode


def says(wire: str, question: str, *expected: str, result: str, key: str = cases.KEY) -> str:
    printed = opencode(wire).ask(question, key)
    cases.check(all(text in printed for text in expected), printed[-300:])
    return result


def tools(wire: str) -> str:
    Path("note.txt").write_text("the secret is 42")
    result = "it read a file, ran `echo`, and the model got its output"
    return says(wire, cases.CALL, "The tool said:", "paceline-42", result=result)


for _wire in PACKAGES:
    cases.once(f"{_wire}: reads a file, runs a command, answers", _wire)(tools)
    cases.once(f"{_wire}: is interrupted: the worker stops")(opencode(_wire).interrupt)


@cases.once("meets a rate limit")
def limited() -> str:
    result = "waited as long as `retry-after` says, then got its answer"
    return says("chat", "Say hello.", cases.HELLO, result=result, key=cases.LIMITED_KEY)


@cases.once("meets the end of the context")
def overflow() -> str:
    result = "shows the gateway's error: maximum context length"
    return says("chat", cases.OVERFLOW, "maximum context length is", result=result)


if __name__ == "__main__":
    configure_opencode()
    cases.main()
