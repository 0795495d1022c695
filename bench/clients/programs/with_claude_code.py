# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.332", "node@22.23.3"]
# scripted = true
# ///
"""Claude Code, on Anthropic's Messages: a loop of its tools, an interrupt, and limits."""

from pathlib import Path

from bench.clients import cases
from bench.clients.agents import ask_claude, claude_code

_NO_TOOLS = ("--tools", "")


@cases.once("reads a file, runs a command, answers")
def tools() -> str:
    Path("note.txt").write_text("the secret is 42")
    result = ask_claude(cases.CALL, "--tools", "Read,Bash", "--allowedTools", "Read,Bash")
    cases.check("paceline-42" in result["result"], result["result"])
    cases.check(result["num_turns"] == 3, result["num_turns"])
    return f"{result['num_turns']} turns: {result['result']}"


cases.once("is interrupted: its request ends")(claude_code(*_NO_TOOLS).interrupt)


@cases.once("429 of a key with one request a minute")
def limited() -> str:
    key = cases.LIMITED_KEY
    first, second = (ask_claude("Hello.", *_NO_TOOLS, key=key) for _ in range(2))
    cases.check(not first["is_error"], first["result"])
    if second["is_error"]:
        cases.check("limit" in second["result"].lower(), second["result"])
        return str(second["result"])
    return f"waited {second['duration_ms'] / 1000:.0f} s, then: {second['result']}"


@cases.once("the context of the model is full")
def full() -> str:
    result = ask_claude(f"Summarise this. {cases.OVERFLOW}", *_NO_TOOLS)
    cases.check(result["is_error"] and "too long" in result["result"], result)
    return str(result["result"])


if __name__ == "__main__":
    cases.main()
