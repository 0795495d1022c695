# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.169.0"]
# ///
"""Codex, on Responses: a conversation with the demo model, with all of its tools."""

from __future__ import annotations

import json

from bench.clients.cases import ONCE, Mode, case, check, main
from bench.clients.codex import agent, configure


@case("all of its tools and two turns: what is read again", ONCE)
def conversation(_: Mode) -> str:
    first = _usage("Count from 1 to 5.", "--json")
    both = _usage("Count from 1 to 6.", "--json", "resume", "--last")
    earlier = first["input_tokens"] + first["output_tokens"]
    share = (both["cached_input_tokens"] - first["cached_input_tokens"]) / earlier
    check(share >= 0.95, (first, both))
    return f"{earlier:,} tokens after the first turn; found again: {share:.1%}"


def _usage(question: str, *options: str) -> dict[str, int]:
    """Return the usage of the conversation so far."""
    printed = agent(*options).ask(question)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    usages = [event["usage"] for event in events if event["type"] == "turn.completed"]
    check(usages, printed[-300:])
    last: dict[str, int] = usages[-1]
    return last


if __name__ == "__main__":
    configure()
    main()
