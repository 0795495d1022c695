"""Fields that change no answer, or that engines lack: the header, and what workers get."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import ScriptedWorker


def test_the_header_lists_ignored_fields_and_a_worker_gets_no_neutral_one(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """Strict workers reject fields that they do not know; a hint such as verbosity is theirs."""
    client, path = gateway_with_worker.client, "/v1/chat/completions"
    ignored = {"verbosity": "low", "best_of": 1, "modalities": ["text"], "store": None}
    for stream in (False, True):
        answer = client.post(path, json=chat_body(stream=stream, **ignored))
        assert answer.headers["x-paceline-ignored"] == "verbosity, best_of, modalities"
        sent = worker.requests[-1].body
        assert sent["verbosity"] == "low"
        assert not {"best_of", "modalities", "store"} & sent.keys()
    assert "x-paceline-ignored" not in client.post(path, json=chat_body()).headers


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_worker_gets_the_allowed_tools_alone(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, mode: str
) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "go", "stop")]

    def ask(**allowed: Any) -> Any:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = chat_body(tools=tools, tool_choice=choice)
        return gateway_with_worker.client.post("/v1/chat/completions", json=body)

    assert ask(mode=mode, tools=[tools[2], tools[0]]).status_code == 200
    sent = worker.requests[-1].body
    assert (sent["tools"], sent["tool_choice"]) == ([tools[0], tools[2]], mode)
    unknown = ask(mode=mode, tools=[{"type": "function", "function": {"name": "fly"}}])
    assert unknown.status_code == 400
    assert unknown.json()["error"]["param"] == "tool_choice.allowed_tools.tools[0]"
    assert ask(mode="none", tools=tools).json()["error"]["param"] == "tool_choice.allowed_tools"
