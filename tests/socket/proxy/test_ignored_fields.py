"""Fields that change no answer, or that engines lack: the header, and what workers get."""

from typing import Any

import pytest

from tests.support.gateway_fixtures import Served
from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import ScriptedWorker


def test_the_header_lists_ignored_fields_and_a_worker_gets_no_neutral_one(served: Served) -> None:
    """Strict workers reject fields that they do not know; a hint such as verbosity is theirs."""
    ignored = {"verbosity": "low", "best_of": 1, "modalities": ["text"], "store": None}
    for stream in (False, True):
        answer = served.gateway.chat(stream=stream, **ignored)
        assert answer.headers["x-paceline-ignored"] == "verbosity, best_of, modalities"
        sent = served.worker.requests[-1].body
        assert sent["verbosity"] == "low"
        assert not {"best_of", "modalities", "store"} & sent.keys()
    assert "x-paceline-ignored" not in served.gateway.chat().headers


def test_the_header_lists_what_a_worker_cannot_hold_calls_to(gateway, worker) -> None:
    """It holds forced calls with every model, and none beside a schema."""
    properties = {"patch": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["patch"]}
    function = {"name": "patch", "strict": True, "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    grammars = {"patch": {"syntax": "regex", "definition": "a+"}}

    def ignored(*, constrains_calls: bool, **fields: Any) -> str | None:
        gateway.join(worker, constrains_calls=constrains_calls)
        answer = gateway.chat(**{"tools": tools, "tool_grammars": grammars, **fields})
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-paceline-ignored")

    for stream in (False, True):
        told = ignored(constrains_calls=False, stream=stream, best_of=1)
        assert told == "best_of, tools.function.strict, tool_grammars"
        assert ignored(constrains_calls=True, stream=stream) is None
        assert ignored(constrains_calls=False, stream=stream, tool_choice="required") is None
    assert ignored(constrains_calls=False, tool_grammars=None) == "tools.function.strict"
    assert ignored(constrains_calls=False, tool_choice="none") is None
    beside = ignored(constrains_calls=True, response_format={"type": "json_object"})
    assert beside == "tools.function.strict, tool_grammars"


@pytest.mark.parametrize("constrains_calls", [False, True])
def test_other_wires_list_these_fields_by_their_own_names(
    gateway: RunningGateway, worker: ScriptedWorker, constrains_calls: bool
) -> None:
    gateway.join(worker, constrains_calls=constrains_calls)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    output = {"type": "json_schema", "schema": schema}
    tools = [{"name": "look", "input_schema": schema, "strict": True}]
    messages = chat_body(max_tokens=5, tools=tools)
    look = {"type": "function", "name": "look", "parameters": schema, "strict": True}
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    patch = {"type": "custom", "name": "patch", "format": grammar}
    responses = {"model": "demo", "input": "Say a word.", "tools": [look, patch]}
    format_of_messages = {"output_config": {"format": output}}
    format_of_responses = {"text": {"format": {**output, "name": "answer"}}}
    for path, body, schema_field, names in (
        ("/v1/messages", messages, format_of_messages, "tools.strict"),
        ("/v1/responses", responses, format_of_responses, "tools.strict, tools.format"),
    ):
        free, beside = (
            gateway.client.post(path, json=sent) for sent in (body, {**body, **schema_field})
        )
        assert [free.status_code, beside.status_code] == [200, 200], beside.text
        assert free.headers.get("x-paceline-ignored") == (None if constrains_calls else names)
        assert beside.headers["x-paceline-ignored"] == names


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_worker_gets_all_tools_and_the_choice_among_them(served: Served, mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "go", "stop")]

    def ask(**allowed: Any) -> Any:
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        return served.gateway.chat(tools=tools, tool_choice=choice)

    assert ask(mode=mode, tools=[tools[2], tools[0]]).status_code == 200
    sent = served.worker.requests[-1].body
    chosen = {"mode": mode, "tools": [tools[2], tools[0]]}
    assert sent["tools"] == tools, "other allowed tools change no prompt, which so stays cached"
    assert sent["tool_choice"] == {"type": "allowed_tools", "allowed_tools": chosen}
    unknown = ask(mode=mode, tools=[{"type": "function", "function": {"name": "fly"}}])
    assert unknown.status_code == 400
    assert unknown.json()["error"]["param"] == "tool_choice.allowed_tools.tools[0]"
    assert ask(mode="none", tools=tools).json()["error"]["param"] == "tool_choice.allowed_tools"


def test_an_engine_that_would_not_go_on_from_the_last_message_gets_none(served: Served) -> None:
    """It would answer it instead; workers of Paceline get the fields only where they matter."""
    roles = {"user": "Sing", "assistant": "La"}
    begun = [{"role": role, "content": text} for role, text in roles.items()]
    prefill = chat_body(messages=begun, max_tokens=9)
    assert served.gateway.client.post("/v1/messages", json=prefill).status_code == 200
    fields = {"add_generation_prompt": True, "continue_final_message": False}
    assert fields.keys() <= served.worker.requests[-1].body.keys()
    assert served.gateway.chat(messages=begun, **fields).status_code == 200
    assert not fields.keys() & served.worker.requests[-1].body.keys()


def test_a_mark_on_the_last_message_is_another_spelling_of_the_field(served: Served) -> None:
    """A worker gets the same body, in which a mark that is false or null changes nothing either."""
    roles = {"user": "Sing", "assistant": "La"}
    begun = [{"role": role, "content": text} for role, text in roles.items()]
    asking = {"add_generation_prompt": False, "continue_final_message": True}
    ended = [{"role": "assistant", "content": "La", "prefix": False}, begun[0] | {"partial": None}]
    for fields, messages in (
        (asking, begun),
        ({}, [begun[0], begun[1] | {"prefix": True}]),
        ({"add_generation_prompt": False}, [begun[0], begun[1] | {"partial": True}]),
        (asking, [begun[0] | {"prefix": False}, begun[1] | {"prefix": True, "partial": True}]),
    ):
        assert served.gateway.chat(messages=[*ended, *messages], **fields).status_code == 200
        sent = served.worker.requests[-1].body
        # Neighbours of one role are one message.
        said = [("assistant", "La"), ("user", "Sing\n\nSing"), ("assistant", "La")]
        assert [(one["role"], one["content"]) for one in sent["messages"]] == said
        assert not {"prefix", "partial"}.intersection(*sent["messages"])
        assert sent.items() >= asking.items()


def test_only_a_last_message_of_the_assistant_can_be_marked(module_gateway) -> None:
    user, said = {"role": "user", "content": "Sing"}, {"role": "assistant", "content": "La"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for name in ("prefix", "partial"):
        for place, messages, fields in (
            (0, [user | {name: True}], {}),
            (1, [user, said | {name: True}, user], {}),
            (1, [user, said | {name: True}, user, said | {name: True}], {}),
            (0, [user | {name: True}, said | {name: True}], {}),
            (1, [user, said | {name: True, "tool_calls": [call]}], {}),
            (1, [user, said | {name: True}], {"add_generation_prompt": True}),
            (1, [user, said | {name: "yes"}], {}),
        ):
            refused = module_gateway.chat(messages=messages, **fields)
            error = refused.json()["error"]
            param = f"messages[{place}].{name}"
            assert (refused.status_code, error["param"]) == (400, param), messages
            assert name in error["message"]
