# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.332", "node@22.23.3"]
# scripted = true
# ///
"""Claude Code, on Anthropic's Messages: one long session, in which a script plays the model."""

from __future__ import annotations

import json
import sys
from functools import partial

from bench.clients.cases import MODEL, ONCE, Mode, case, check, get, main
from bench.clients.claude_code import ask
from bench.clients.session import (
    FOUND,
    LONG,
    MCP_SERVER,
    PDF,
    PDF_TEXT,
    PICTURE,
    pictures_of,
    play,
    search_compact_and_continue,
    text_of,
    write_files,
)

_SERVERS = {"mcpServers": {"notes": {"command": sys.executable, "args": [str(MCP_SERVER)]}}}
_TOOLS = "Read,Bash,ToolSearch"
_OPTIONS = (
    *("--mcp-config", json.dumps(_SERVERS), "--tools", _TOOLS),
    *("--allowedTools", f"{_TOOLS},{FOUND}"),
)


def window() -> int:
    """Return the context of the model, as the gateway tells it."""
    told = get(f"/v1/models/{MODEL}", **{"anthropic-version": "2023-06-01"})
    return int(json.loads(told)["max_input_tokens"])


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
    asked, told = play(partial(go_on, continued=False), ("Read", {"file_path": PDF}))
    check(PDF_TEXT in text_of(told) and PDF_TEXT not in text_of(asked), text_of(told))
    return f"the model got its text, and {len(pictures_of(told))} page as a picture"


@case("reads a picture (scripted: the call of Read)", ONCE)
def reads_picture(_: Mode) -> str:
    asked, told = play(go_on, ("Read", {"file_path": PICTURE}))
    check(len(pictures_of(told)) > len(pictures_of(asked)), pictures_of(told))
    return "the model got it as a picture"


if __name__ == "__main__":
    search = ("ToolSearch", {"query": f"select:{FOUND}"})
    read = ("Bash", {"command": f"cat {LONG}", "description": "read"})
    search_compact_and_continue(go_on, search, read, (4, 3), window())
    write_files()
    main()
