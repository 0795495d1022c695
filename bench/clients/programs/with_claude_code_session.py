# /// script
# [tool.paceline]
# npm = ["@anthropic-ai/claude-code@2.1.332", "node@22.23.3"]
# scripted = true
# ///
"""Claude Code, on Anthropic's Messages: one long session, in which a script plays the model."""

import json
import sys
from functools import partial

from bench.clients import cases, session
from bench.clients.agents import ask_claude

_SERVER = {"command": sys.executable, "args": [str(session.MCP_SERVER)]}
_TOOLS = "Read,Bash,ToolSearch"
_OPTIONS = (
    *("--mcp-config", json.dumps({"mcpServers": {"notes": _SERVER}}), "--tools", _TOOLS),
    *("--allowedTools", f"{_TOOLS},{session.FOUND}"),
)
# The context of the model, as the gateway tells it.
_TOLD = cases.get(f"/v1/models/{cases.MODEL}", **{"anthropic-version": "2023-06-01"})
WINDOW = int(json.loads(_TOLD)["max_input_tokens"])


def go_on(question: str, *, continued: bool = True) -> str:
    options = (*_OPTIONS, "--continue") if continued else _OPTIONS
    result = ask_claude(question, *options, CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(WINDOW))
    cases.check(not result["is_error"], result["result"])
    believed = result["modelUsage"][cases.MODEL]["contextWindow"]
    cases.check(believed == WINDOW, f"believes in {believed} tokens")
    return str(result["result"])


@cases.once("reads a PDF (scripted: the call of Read)")
def reads_pdf() -> str:
    first = partial(go_on, continued=False)
    asked, told = session.play(first, ("Read", {"file_path": session.PDF}))
    text = session.text_of(told)
    cases.check(session.PDF_TEXT in text, text)
    cases.check(session.PDF_TEXT not in session.text_of(asked), text)
    return f"the model got its text, and {len(session.pictures_of(told))} page as a picture"


@cases.once("reads a picture (scripted: the call of Read)")
def reads_picture() -> str:
    asked, told = session.play(go_on, ("Read", {"file_path": session.PICTURE}))
    pictures = session.pictures_of(told)
    cases.check(len(pictures) > len(session.pictures_of(asked)), pictures)
    return "the model got it as a picture"


if __name__ == "__main__":
    search = ("ToolSearch", {"query": f"select:{session.FOUND}"})
    read = ("Bash", {"command": f"cat {session.LONG}", "description": "read"})
    session.search_compact_and_continue(go_on, search, read, (4, 3), WINDOW)
    session.write_files()
    cases.main()
