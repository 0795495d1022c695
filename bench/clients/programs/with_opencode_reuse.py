# /// script
# [tool.paceline]
# npm = ["opencode-ai@1.18.33"]
# ///
"""opencode, on chat: a conversation with the demo model, with its own prompt and all its tools."""

from typing import Any

from bench.clients import cases
from bench.clients.agents import configure_opencode, events_of, opencode


@cases.once("all of its tools and two turns: what is read again")
def conversation() -> str:
    first = _tokens("Count from 1 to 5.")
    then = _tokens("Count from 1 to 6.", "--continue")
    share = then["cache"]["read"] / first["total"]
    cases.check(share >= 0.95, (first, then))
    return f"{first['total']:,} tokens after the first turn; found again: {share:.1%}"


def _tokens(question: str, *options: str) -> dict[str, Any]:
    """Return the tokens of the last step of a turn."""
    one = opencode("chat", "--format", "json", *options, timeout_s=900.0)
    printed = one.ask(question)
    steps = [e["part"]["tokens"] for e in events_of(printed) if e["type"] == "step_finish"]
    cases.check(steps, printed[-300:])
    return dict(steps[-1])


if __name__ == "__main__":
    configure_opencode(output_tokens=200)
    cases.main()
