"""Fields that change no answer, or that engines lack: the header, and what workers get."""

import json
from typing import Any

import httpx
import pytest

from gateway.config.static_workers import StaticWorker
from paceline.request.constraint import read_constraint
from tests.support.gateway_fixtures import Served
from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import Script, ScriptedWorker


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


SHARED_FIELDS: dict[str, Any] = {
    "seed": 7,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.5},
    "stop": ["END"],
    "ignore_eos": True,
    "min_tokens": 2,
    "stop_token_ids": [7],
    "truncate_prompt_tokens": 100,
    "draft_tokens": 2,
    "specprefill": False,
    "specprefill_keep_pct": 0.5,
    "chat_template_kwargs": {"enable_thinking": False},
    "structured_outputs": {"choice": ["one", "two"]},
    "thinking_budget": 5,
    "include_reasoning": False,
    "reasoning_effort": "low",
    "metrics": "summary",
}
OTHER_WIRES = {
    "/v1/messages": chat_body(max_tokens=9),
    "/v1/responses": {"model": "demo", "input": "Say a word.", "store": False},
}


@pytest.mark.parametrize("path", OTHER_WIRES)
def test_other_wires_take_the_fields_of_engines_as_a_chat_does(shared: Served, path: str) -> None:
    for stream in (False, True):
        body = {**OTHER_WIRES[path], **SHARED_FIELDS, "stream": stream}
        answer = shared.gateway.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "x-paceline-ignored" not in answer.headers
        sent = shared.worker.requests[-1].body
        assert {name: sent.get(name) for name in SHARED_FIELDS} == SHARED_FIELDS
        assert '"speculative_decoding"' in answer.text
    synonyms = {**OTHER_WIRES[path], "repeat_penalty": 1.5, "enable_thinking": True, "odd": None}
    hints = {"cache_prompt": True, "id_slot": 1, "separate_reasoning": True, "adapters": None}
    answer = shared.gateway.client.post(path, json={**synonyms, **hints})
    assert answer.headers["x-paceline-ignored"] == "cache_prompt, id_slot, separate_reasoning"
    sent = shared.worker.requests[-1].body
    assert (sent["repetition_penalty"], sent["chat_template_kwargs"]) == (
        1.5,
        {"enable_thinking": True},
    )
    assert not {"repeat_penalty", "enable_thinking", "odd", *hints} & sent.keys()
    assert '"metrics"' not in answer.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/messages", {"stop": [""]}, "stop"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"stop": "a", "stop_sequences": ["b"]}, "stop"),
        ("/v1/messages", {"thinking_budget": -1}, "thinking_budget"),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": -1}},
            "thinking.budget_tokens",
        ),
        ("/v1/messages", {"thinking": {"type": "disabled", "odd": 1}}, "thinking.odd"),
        ("/v1/messages", {"tools": [{"name": "f", "odd": 1}]}, "tools.0.odd"),
        ("/v1/messages", {"system": [{"type": "text", "text": "a", "odd": 1}]}, "system.0.odd"),
        ("/v1/messages", {"output_config": {"odd": 1}}, "output_config.odd"),
        ("/v1/messages", {"tool_choice": {"type": "auto", "odd": 1}}, "tool_choice.odd"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "odd": 1}]}]},
            "messages.0.content.0.odd",
        ),
        ("/v1/messages", {"token_sources": True}, "token_sources"),
        ("/v1/messages", {"seed": "x"}, "seed"),
        ("/v1/messages", {"repeat_penalty": 20}, "repeat_penalty"),
        ("/v1/responses", {"stop": [""]}, "stop"),
        ("/v1/responses", {"repeat_penalty": 20}, "repeat_penalty"),
        ("/v1/responses", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (
            "/v1/responses",
            {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
            "reasoning_effort",
        ),
        ("/v1/responses", {"reasoning": {"odd": 1}}, "reasoning.odd"),
        ("/v1/responses", {"text": {"odd": 1}}, "text.odd"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "text", "odd": 1}}},
            "text.format.odd",
        ),
        ("/v1/responses", {"stream_options": {"odd": 1}}, "stream_options.odd"),
        (
            "/v1/responses",
            {"tools": [{"type": "function", "name": "f", "odd": 1}]},
            "tools[0].odd",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "odd": 1}]}, "input[0].odd"),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a", "odd": 1}]}
                ]
            },
            "input[0].content[0].odd",
        ),
        ("/v1/responses", {"token_sources": True}, "token_sources"),
        ("/v1/responses", {"min_tokens": 9, "max_output_tokens": 8}, "min_tokens"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"top_logprobs": ""}, "top_logprobs"),
        ("/v1/responses", {"reasoning": {"effort": ""}}, "reasoning.effort"),
        (
            "/v1/responses",
            {
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "f", "odd": 1}],
                },
            },
            "tool_choice.tools[0].odd",
        ),
    ],
)
def test_an_error_names_a_field_as_the_client_spells_it(shared, path, fields, param) -> None:
    answer = shared.gateway.client.post(path, json={**OTHER_WIRES[path], **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.get("param", param) == param
    assert param in error["message"]
    if "max_output_tokens" in fields:  # which a chat has under another name
        assert "'max_output_tokens'" in error["message"]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", "tools[1].function.name"),
        ("/v1/messages", "tools.1.name"),
        ("/v1/responses", "tools[1].name"),
    ],
)
def test_a_name_stands_for_one_tool_which_may_come_twice(shared: Served, path, place) -> None:
    def ask(*descriptions: str) -> Any:
        tools: list[Any] = [{"name": "f", "description": one} for one in descriptions]
        if path != "/v1/messages":
            flat = path == "/v1/responses"
            tools = [{"type": "function", **(one if flat else {"function": one})} for one in tools]
        body = {**OTHER_WIRES.get(path, chat_body()), "tools": tools}
        return shared.gateway.client.post(path, json=body)

    assert ask("a", "a").status_code == 200
    error = ask("a", "b").json()["error"]
    assert "Two different tools are called 'f'." in error["message"]
    assert place in error.get("param", error["message"])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": "FORM"}),
        ("/v1/completions", {"response_format": "FORM"}),
        ("/v1/responses", {"text": {"format": "FORM"}}),
        ("/v1/responses", {"response_format": "FORM"}),
        ("/v1/messages", {"output_config": {"format": "FORM"}}),
        ("/v1/messages", {"response_format": "FORM"}),
    ],
)
def test_a_schema_beside_json_object_reaches_the_worker_from_each_wire(
    shared: Served, path: str, fields: dict[str, Any]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    form = {"type": "json_object", "schema": schema}
    given = json.loads(json.dumps(fields).replace('"FORM"', json.dumps(form)))
    body = {"/v1/completions": {"model": "demo", "prompt": "x"}, **OTHER_WIRES}.get(
        path, chat_body()
    )
    answer = shared.gateway.client.post(path, json={**body, **given})
    assert answer.status_code == 200, answer.text
    sent = read_constraint(shared.worker.requests[-1].body)
    assert sent is not None
    assert sent.value == schema


MARKED = (
    ("/v1/chat/completions", "messages", "messages[{}].{}"),
    ("/v1/responses", "input", "input[{}].{}"),
    ("/v1/messages", "messages", "messages.{}.{}"),
)
"""The wires, the field of their messages, and how they name a mark."""


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
        for path, field, _ in MARKED:
            body = {"model": "demo", field: [*ended, *messages], **fields}
            answer = served.gateway.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert "x-paceline-ignored" not in answer.headers
            sent = served.worker.requests[-1].body
            # Neighbours of one role are one message.
            said = [("assistant", "La"), ("user", "Sing\n\nSing"), ("assistant", "La")]
            assert [(one["role"], one["content"]) for one in sent["messages"]] == said
            assert not {"prefix", "partial"}.intersection(*sent["messages"])
            assert sent.items() >= asking.items()


def test_a_mark_that_the_template_refuses_is_named_as_the_client_wrote_it(served: Served) -> None:
    error = {"message": "The template cannot go on.", "param": "continue_final_message"}
    served.worker.script = Script(status=400, body=json.dumps({"error": error}).encode())
    said = {"role": "assistant", "content": "La", "partial": True}
    for path, field, name in MARKED:
        body = {"model": "demo", field: [{"role": "user", "content": "Sing"}, said]}
        for stream in (False, True):
            refused = served.gateway.client.post(path, json=body | {"stream": stream})
            assert refused.status_code == 400
            assert name.format(1, "partial") in refused.text


def test_only_a_last_message_of_the_assistant_can_be_marked(module_gateway) -> None:
    user, said = {"role": "user", "content": "Sing"}, {"role": "assistant", "content": "La"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    items = [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]
    blocks = [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
    for name in ("prefix", "partial"):
        marked = said | {name: True}
        for place, messages, fields, wires in (
            (0, [user | {name: True}], {}, MARKED),
            (1, [user, marked, user], {}, MARKED),
            (1, [user, marked, user, marked], {}, MARKED),
            (0, [user | {name: True}, marked], {}, MARKED),
            (1, [user, marked | {"tool_calls": [call]}], {}, MARKED[:1]),
            (1, [user, marked, *items], {}, MARKED[1:2]),
            (1, [user, marked | {"content": blocks}], {}, MARKED[2:]),
            (1, [user, marked | {"content": []}, user], {}, MARKED),
            (0, [user | {"content": [{"type": "text", "text": "a"}], name: True}], {}, MARKED),
            (1, [user, marked], {"add_generation_prompt": True}, MARKED[:2]),
            (1, [user, said | {name: "yes"}], {}, MARKED),
        ):
            for path, field, path_of_mark in wires:
                body = {"model": "demo", field: messages, **fields}
                refused = module_gateway.client.post(path, json=body)
                assert refused.status_code == 400, (path, messages)
                assert path_of_mark.format(place, name) in refused.text, (path, messages)


def test_what_no_engine_takes_is_named_as_the_client_asks_for_it(make_gateway, worker) -> None:
    entry = StaticWorker(id="mac", kind="mlx-lm", url=worker.url, models=("demo",))
    gateway = make_gateway(workers=(entry,))
    for path, body in {"/v1/chat/completions": chat_body(), **OTHER_WIRES}.items():
        for name, value in (
            ("guided_regex", "a+"),
            ("structured_outputs", {"regex": "a+"}),
            ("response_format", {"type": "json_object"}),
            ("thinking_token_budget", 5),
            ("thinking_budget", 5),
        ):
            refused = gateway.client.post(path, json={**body, name: value})
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert "supports" in error["message"]
            assert error.get("param", name) == name
    said = {"role": "assistant", "content": "La", "prefix": True}
    for path, field, mark in MARKED:
        body = {"model": "demo", field: [{"role": "user", "content": "Sing"}, said]}
        refused = gateway.client.post(path, json=body)
        assert (refused.status_code, mark.format(1, "prefix") in refused.text) == (400, True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", *OTHER_WIRES])
def test_names_that_another_server_gave_its_answer_end_no_conversation(shared, path: str) -> None:
    """They are listed, as far as a header can hold them; in a client's own message they are not."""
    odd = {"odd": 1, "a\nb": 2, "x" * 65: 3}
    part = {"type": "output_text" if path.endswith("responses") else "text", "text": "Yes.", **odd}
    answer, question = ({"role": role, "content": [part]} for role in ("assistant", "user"))
    if path.endswith("responses"):
        answer["type"] = "message"

    def post(*messages: Any) -> httpx.Response:
        body = {**OTHER_WIRES.get(path, chat_body())}
        body["input" if path.endswith("responses") else "messages"] = messages
        return shared.gateway.client.post(path, json=body)

    heard = {"role": "user", "content": "Is it?"}
    given = post(heard, {**answer, **odd}, heard)
    assert given.status_code == 200, given.text
    field = "input" if path.endswith("responses") else "messages"
    assert given.headers["x-paceline-ignored"] == f"{field}.odd, {field}.content.odd"
    assert "odd" in post({**question, "role": "user"}).text
    many = {f"n{at}": at for at in range(5000)}
    assert len(post(heard, {**answer, **many}, heard).headers["x-paceline-ignored"]) < 4096
