# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.332", "node@22.23.3"]
# scripted = true
# ///
"""Claude Code, on Anthropic's Messages: one long session, in which a script plays the model."""

from __future__ import annotations

import json
import sys

from bench.clients.cases import MODEL, ONCE, Mode, case, check, get, main
from bench.clients.claude_code import ask
from bench.clients.mcp_server import NEST, TOOL
from bench.clients.session import (
    LONG,
    MCP_SERVER,
    PDF,
    PDF_TEXT,
    PICTURE,
    SUMMARY,
    compactions,
    pictures_of,
    play,
    refusals,
    text_of,
    tools_of,
    write_files,
)

_FOUND = f"mcp__notes__{TOOL}"
_SERVERS = {"mcpServers": {"notes": {"command": sys.executable, "args": [str(MCP_SERVER)]}}}
_TOOLS = "Read,Bash,ToolSearch"
_OPTIONS = (
    *("--mcp-config", json.dumps(_SERVERS), "--tools", _TOOLS),
    *("--allowedTools", f"{_TOOLS},{_FOUND}"),
)
_CAT = ("Bash", {"command": f"cat {LONG}", "description": "read"})


def window() -> int:
    """Return the context of the model, as the gateway tells it."""
    told = get(f"/v1/models/{MODEL}", **{"anthropic-version": "2023-06-01"})
    return int(json.loads(told)["max_input_tokens"])


def begin(question: str) -> str:
    """Return the answer of a new session."""
    return go_on(question, continued=False)


def go_on(question: str, *, continued: bool = True) -> str:
    """Return the answer of the session."""
    options = (*_OPTIONS, "--continue") if continued else _OPTIONS
    result = ask(question, *options, CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(window()))
    check(not result["is_error"], result["result"])
    believed = result["modelUsage"][MODEL]["contextWindow"]
    check(believed == window(), f"believes in {believed} tokens")
    return str(result["result"])


@case("reads a PDF (scripted: the call of Read)", ONCE)
def reads_pdf(_: Mode) -> str:
    asked, told = play(begin, ("Read", {"file_path": PDF}))
    check(PDF_TEXT in text_of(told) and PDF_TEXT not in text_of(asked), text_of(told))
    return f"the model got its text, and {len(pictures_of(told))} page as a picture"


@case("reads a picture (scripted: the call of Read)", ONCE)
def reads_picture(_: Mode) -> str:
    asked, told = play(go_on, ("Read", {"file_path": PICTURE}))
    check(len(pictures_of(told)) > len(pictures_of(asked)), pictures_of(told))
    return "the model got it as a picture"


@case("searches its tools, and calls what it found (scripted: both calls)", ONCE)
def searches(_: Mode) -> str:
    asked, found, told = play(go_on, ("ToolSearch", {"query": f"select:{_FOUND}"}), (_FOUND, {}))
    check(_FOUND not in tools_of(asked) and _FOUND in tools_of(found), tools_of(found))
    check(NEST in text_of(told), text_of(told)[-300:])
    return f"{TOOL} was no tool of the model before the search"


@case("compacts twice (scripted: seven calls of Bash, both summaries)", ONCE)
def compacts(_: Mode) -> str:
    chats = [*play(go_on, _CAT, _CAT, _CAT, _CAT), *play(go_on, _CAT, _CAT, _CAT)]
    found = compactions(chats, window())
    check(len(found) == 2, found)
    return f"{', '.join(found)}; the model has {window():,}"


@case("is continued after its end, and had no request refused (scripted: the answer)", ONCE)
def continued(_: Mode) -> str:
    told = play(go_on)[-1]
    check(SUMMARY in text_of(told), text_of(told)[:300])
    check(refusals() == refused, f"{refusals() - refused} requests refused")
    return "the model got the summary and what followed it"


if __name__ == "__main__":
    refused = refusals()
    write_files()
    main()
