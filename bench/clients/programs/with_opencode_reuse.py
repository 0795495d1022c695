# /// script
# [tool.paceline]
# npm = ["opencode-ai@1.18.33"]
# ///
"""opencode, on chat: a conversation with the demo model, with its own prompt and all its tools."""

from __future__ import annotations

import json
from typing import Any

from bench.clients.cases import ONCE, Mode, case, check, main
from bench.clients.opencode import agent, configure

_OUTPUT_TOKENS = 200
_TIMEOUT_S = 900.0


@case("all of its tools and two turns: what is read again", ONCE)
def conversation(_: Mode) -> str:
    first = _tokens("Count from 1 to 5.")
    then = _tokens("Count from 1 to 6.", "--continue")
    share = then["cache"]["read"] / first["total"]
    check(share >= 0.95, (first, then))
    return f"{first['total']:,} tokens after the first turn; found again: {share:.1%}"


def _tokens(question: str, *options: str) -> dict[str, Any]:
    """Return the tokens of the last step of a turn."""
    one = agent("chat", "--format", "json", *options, timeout_s=_TIMEOUT_S)
    printed = one.ask(question)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    steps = [event["part"]["tokens"] for event in events if event["type"] == "step_finish"]
    check(steps, printed[-300:])
    last: dict[str, Any] = steps[-1]
    return last


if __name__ == "__main__":
    configure(_OUTPUT_TOKENS)
    main()
