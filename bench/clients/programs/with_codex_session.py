# /// script
# [tool.paceline]
# npm = ["@openai/codex@0.171.0"]
# scripted = true
# ///
"""Codex, on Responses: one long session, in which a script plays the model."""

import json

from bench.clients import cases, session
from bench.clients.agents import codex, configure_codex

WINDOW = int(json.loads(cases.get(f"/v1/models/{cases.MODEL}"))["max_model_len"])
begin, go_on = codex().ask, codex("resume", "--last").ask


@cases.once("reads a picture (scripted: the call of view_image)")
def reads_picture() -> str:
    asked, told = session.play(begin, ("view_image", {"path": session.PICTURE}))
    seen = session.pictures_of(told) and not session.pictures_of(asked)
    cases.check(seen, session.text_of(told)[-300:])
    return "the model got it as a picture"


@cases.once("has no way to send a PDF: its protocol has none (scripted: the call of view_image)")
def reads_no_pdf() -> str:
    told = session.text_of(session.play(go_on, ("view_image", {"path": session.PDF}))[-1])
    found = "unable to process image"
    cases.check(found in told, told[-300:])
    return f"the model got its words: {found}"


if __name__ == "__main__":
    search = ("tool_search", {"query": "heron"})
    read = ("exec_command", {"cmd": f"cat {session.LONG}"})
    session.search_compact_and_continue(go_on, search, read, (4, 7), WINDOW)
    session.write_files()
    configure_codex(WINDOW, session.MCP_SERVER)
    cases.main()
