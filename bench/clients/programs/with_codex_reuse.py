# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.169.0"]
# ///
"""Codex, on Responses: a conversation with the demo model, with all of its tools."""

from bench.clients import cases
from bench.clients.agents import codex, configure_codex, events_of


@cases.once("all of its tools and two turns: what is read again")
def conversation() -> str:
    first = _usage("Count from 1 to 5.", "--json")
    both = _usage("Count from 1 to 6.", "--json", "resume", "--last")
    earlier = first["input_tokens"] + first["output_tokens"]
    share = (both["cached_input_tokens"] - first["cached_input_tokens"]) / earlier
    cases.check(share >= 0.95, (first, both))
    return f"{earlier:,} tokens after the first turn; found again: {share:.1%}"


def _usage(question: str, *options: str) -> dict[str, int]:
    """Return the usage of the conversation so far."""
    printed = codex(*options).ask(question)
    usages = [one["usage"] for one in events_of(printed) if one["type"] == "turn.completed"]
    cases.check(usages, printed[-300:])
    return dict(usages[-1])


if __name__ == "__main__":
    configure_codex()
    cases.main()
