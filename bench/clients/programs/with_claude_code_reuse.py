# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.197", "node@22.23.3"]
# ///
"""Claude Code, on Anthropic's Messages: a conversation with the demo model."""

import uuid

from bench.clients import cases
from bench.clients.agents import ask_claude

_COUNTS = (
    *("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
    "output_tokens",
)


@cases.once("two tools and three turns: what is read again")
def conversation() -> str:
    session, shares, read = str(uuid.uuid4()), [], 0
    for turn, number in enumerate((5, 6, 7)):
        where = ("--resume", session) if turn else ("--session-id", session)
        result = ask_claude(f"Count from 1 to {number}.", "--tools", "Read,Bash", *where)
        cases.check(not result["is_error"] and "1, 2, 3" in result["result"], result["result"])
        usage = result["usage"]
        if turn:
            shares.append(usage["cache_read_input_tokens"] / read)
        read = sum(usage[name] for name in _COUNTS)
    cases.check(min(shares) >= 0.95, shares)
    found = ", ".join(f"{share:.1%}" for share in shares)
    return f"{read:,} tokens in the end; of the earlier ones found again: {found}"


@cases.once("all of its tools do not fit into the demo's context")
def overflow() -> str:
    result = ask_claude("Count from 1 to 5.")
    cases.check(result["is_error"] and result["result"].startswith("Prompt is too long"), result)
    return str(result["result"])


if __name__ == "__main__":
    cases.main()
