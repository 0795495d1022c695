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
from bench.clients.session import (
    LONG,
    MCP_SERVER,
    PDF,
    PICTURE,
    pictures_of,
    play,
    search_compact_and_continue,
    text_of,
    write_files,
)

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


if __name__ == "__main__":
    search = ("tool_search", {"query": "heron"})
    read = ("exec_command", {"cmd": f"cat {LONG}"})
    search_compact_and_continue(go_on, search, read, (4, 7), WINDOW)
    write_files()
    configure_session(WINDOW, MCP_SERVER)
    main()
