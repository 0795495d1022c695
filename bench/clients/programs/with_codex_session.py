# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.171.0"]
# scripted = true
# ///
"""Codex, on Responses: one long session, in which a script plays the model."""

from __future__ import annotations

import json

from bench.clients.cases import MODEL, ONCE, Mode, case, check, get, main
from bench.clients.codex import agent, configure_session
from bench.clients.mcp_server import NEST, TOOL
from bench.clients.session import (
    LONG,
    MCP_SERVER,
    PDF,
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
_CAT = ("exec_command", {"cmd": f"cat {LONG}"})
WINDOW = int(json.loads(get(f"/v1/models/{MODEL}"))["max_model_len"])
begin, go_on = agent().ask, agent("resume", "--last").ask


@case("reads a picture (scripted: the call of view_image)", ONCE)
def reads_picture(_: Mode) -> str:
    asked, told = play(begin, ("view_image", {"path": PICTURE}))
    check(pictures_of(told) and not pictures_of(asked), text_of(told)[-300:])
    return "the model got it as a picture"


@case("has no way to send a PDF: its protocol has none (scripted: the call of view_image)", ONCE)
def reads_no_pdf(_: Mode) -> str:
    told = text_of(play(go_on, ("view_image", {"path": PDF}))[-1])
    found = "unable to process image"
    check(found in told, told[-300:])
    return f"the model got its words: {found}"


@case("searches its tools, and calls what it found (scripted: both calls)", ONCE)
def searches(_: Mode) -> str:
    asked, found, told = play(go_on, ("tool_search", {"query": "heron"}), (_FOUND, {}))
    check(_FOUND not in tools_of(asked) and _FOUND in tools_of(found), tools_of(found))
    check(NEST in text_of(told), text_of(told)[-300:])
    return f"{TOOL} was no tool of the model before the search"


@case("compacts twice (scripted: eleven calls of exec_command, both summaries)", ONCE)
def compacts(_: Mode) -> str:
    chats = [*play(go_on, *[_CAT] * 4), *play(go_on, *[_CAT] * 7)]
    found = compactions(chats, WINDOW)
    check(len(found) == 2, found)
    return f"{', '.join(found)}; the model has {WINDOW:,}"


@case("is continued after its end, and had no request refused (scripted: the answer)", ONCE)
def continued(_: Mode) -> str:
    told = play(go_on)[-1]
    check(SUMMARY in text_of(told), text_of(told)[:300])
    check(refusals() == refused, f"{refusals() - refused} requests refused")
    return "the model got the summary and what followed it"


if __name__ == "__main__":
    refused = refusals()
    write_files()
    configure_session(WINDOW, MCP_SERVER)
    main()
