# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.197", "node@22.23.3"]
# ///
"""Claude Code, on Anthropic's Messages: a conversation with the demo model."""

from __future__ import annotations

import uuid

from bench.clients.cases import ONCE, Mode, case, check, main
from bench.clients.claude_code import ask

_COUNTS = (
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    "output_tokens",
)


@case("two tools and three turns: what is read again", ONCE)
def conversation(_: Mode) -> str:
    session, shares, read = str(uuid.uuid4()), [], 0
    for turn, number in enumerate((5, 6, 7)):
        where = ("--resume", session) if turn else ("--session-id", session)
        result = ask(f"Count from 1 to {number}.", "--tools", "Read,Bash", *where)
        check(not result["is_error"] and "1, 2, 3" in result["result"], result["result"])
        usage = result["usage"]
        if turn:
            shares.append(usage["cache_read_input_tokens"] / read)
        read = sum(usage[name] for name in _COUNTS)
    check(min(shares) >= 0.95, shares)
    found = ", ".join(f"{share:.1%}" for share in shares)
    return f"{read:,} tokens in the end; of the earlier ones found again: {found}"


@case("all of its tools do not fit into the demo's context", ONCE)
def overflow(_: Mode) -> str:
    result = ask("Count from 1 to 5.")
    check(result["is_error"] and result["result"].startswith("Prompt is too long"), result)
    return str(result["result"])


if __name__ == "__main__":
    main()
