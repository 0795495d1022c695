# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.169.0"]
# ///
"""Codex, on Responses: a conversation with the demo model."""

from __future__ import annotations

import json

from bench.clients.cases import ONCE, Mode, case, check, main
from bench.clients.codex import codex


def turn(question: str, *options: str) -> dict[str, int]:
    """Return the usage of one run."""
    printed = codex(question, *options)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    ends = [event["usage"] for event in events if event["type"] == "turn.completed"]
    check(len(ends) == 1, printed[-300:])
    usage: dict[str, int] = ends[0]
    return usage


@case("its whole prompt and three turns: what is read again", ONCE)
def conversation(_: Mode) -> str:
    shares, read = [], 0
    for number in (5, 6, 7):
        resumed = ("resume", "--last") if read else ()
        usage = turn(f"Count from 1 to {number}.", "--json", *resumed)
        if read:
            shares.append(usage["cached_input_tokens"] / read)
        read = usage["input_tokens"] + usage["output_tokens"]
    check(min(shares) >= 0.95, shares)
    found = ", ".join(f"{share:.1%}" for share in shares)
    return f"{read:,} tokens in the end; of the earlier ones found again: {found}"


if __name__ == "__main__":
    main()
