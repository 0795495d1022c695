"""Histories that the API allows, rendered by templates that each lack something."""

import logging
from random import Random
from typing import Any

import pytest

from tests.support.histories import faults, random_history, rendered
from tests.support.tool_call_text import renderer_of

MESSAGE = """[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>
{%- endfor %}"""
ALL = "{% for m in messages %}" + MESSAGE + "{% endfor %}"
ROLES = "{% set roles = messages | map(attribute='role') | list %}"


def refusing(condition: str, template: str = ALL) -> str:
    """Return a template that refuses chats under a condition."""
    return f"{ROLES}{{% if {condition} %}}{{{{ raise_exception('No.') }}}}{{% endif %}}{template}"


def refusing_each(condition: str) -> str:
    """Return a template that refuses chats with a message under a condition."""
    raised = f"{{% if {condition} %}}{{{{ raise_exception('No.') }}}}{{% endif %}}"
    return "{% for m in messages %}" + raised + MESSAGE + "{% endfor %}"


BEHIND = "loop.previtem and loop.previtem.role =="
TEMPLATES = {
    "takes all": (ALL, ""),
    "no system": (refusing("'system' in roles"), "system=False system_inside=False"),
    "one system": (refusing("roles[:2] == ['system', 'system']"), "systems=False"),
    "two systems, the third without a word": (
        ALL.replace(
            MESSAGE, f"{{% if m.role != 'system' or loop.index < 3 %}}{MESSAGE}{{% endif %}}"
        ),
        "systems=False system_inside=False",
    ),
    "system first": (
        refusing_each("m.role == 'system' and not loop.first"),
        "systems=False system_inside=False",
    ),
    "system in front without a word": (
        "{% for m in messages if m.role == 'system' %}" + MESSAGE + "{% endfor %}"
        "{% for m in messages if m.role != 'system' %}" + MESSAGE + "{% endfor %}",
        "system_inside=False",
    ),
    "a user": (refusing("'user' not in roles"), "userless=False"),
    "a user first": (
        refusing_each("m.role != 'user' and loop.index0 == (roles or 0)").replace(
            "(roles or 0)", "(messages[0].role == 'system') | int"
        ),
        "systems=False opens=False userless=False",
    ),
    "one user": (refusing_each(f"m.role == 'user' and {BEHIND} 'user'"), "users=False"),
    "one answer": (
        refusing_each(f"m.role == 'assistant' and {BEHIND} 'assistant'"),
        "assistants=False",
    ),
    "no user behind a result": (
        refusing_each(f"m.role not in ('assistant', 'tool') and {BEHIND} 'tool'"),
        "system_inside=False user_after_result=False",
    ),
    "no empty answer": (
        refusing_each("m.role == 'assistant' and not m.content and not m.tool_calls"),
        "empty=False",
    ),
    "no reasoning alone": (
        refusing_each("m.reasoning_content and not m.content and not m.tool_calls"),
        "empty=False",
    ),
    "no reasoning alone behind the last user": (
        refusing_each(
            "m.reasoning_content and not m.content and not m.tool_calls and"
            " 'user' not in messages[loop.index :] | map(attribute='role') | list"
        ),
        "empty=False",
    ),
    "one call": (refusing_each("(m.tool_calls or [])[1] is defined"), "parallel_calls=False"),
    "no text beside calls, without a word": (
        ALL.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
        "text_with_calls='before'",
    ),
    "no text beside calls nor before them, and a user first": (
        refusing_each(
            "loop.first and m.role != 'user' or m.tool_calls and"
            " (m.content or loop.previtem.role == 'assistant')"
        ),
        "system=False assistants=False opens=False userless=False text_with_calls='in_text'",
    ),
    "no reasoning beside text and calls": (
        refusing_each("m.content and m.tool_calls and m.reasoning_content"),
        "reasoning=False",
    ),
    "parts alone": (ALL.replace("m.content }}", "(m.content | first).text }}"), "parts=True"),
    "turns that alternate": (
        """{%- set turn = namespace(users=true) -%}{% for m in messages %}
{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls -%}
{%- if (m.role == 'user') != turn.users -%}{{ raise_exception('No.') }}{%- endif -%}
{%- set turn.users = not turn.users -%}{%- endif -%}"""
        + MESSAGE
        + "{% endfor %}",
        "users=False system_inside=False assistants=False opens=False user_after_result=False",
    ),
    "texts alone": (
        refusing_each("m.role not in ('user', 'assistant') or m.tool_calls"),
        "system=False system_inside=False calls_in_text=True results_in_text=True",
    ),
}


@pytest.mark.parametrize("lacks", TEMPLATES)
def test_f67_a_history_is_changed_no_further_than_the_template_needs(lacks, caplog) -> None:
    """No word is lost, and the log tells the changes once."""
    template, changes = TEMPLATES[lacks]
    renderer = renderer_of(template)
    with caplog.at_level(logging.INFO):
        for number in range(60):
            history = random_history(Random(f"unit {number}"))
            assert not faults(history, rendered(renderer, history)), history.messages
    told = [one.getMessage() for one in caplog.records if "histories_changed" in one.getMessage()]
    assert renderer.limits.changes == changes
    assert len(told) == (lacks != "takes all")


CALLS: list[dict[str, Any]] = [
    {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": {"a": 1}}}
    for name in ("add", "get weather")
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_get weather", "content": "Wet"},
    {"role": "tool", "tool_call_id": "call_add", "content": "2"},
    {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
    {"role": "tool", "tool_call_id": "call_add", "content": "3"},
]


def test_f67_ids_hold_the_names_of_functions_that_a_template_leaves_out() -> None:
    """Kimi's templates write the id of a call alone."""
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_call_id %} of {{ m.tool_call_id }};"
        "{% endif %}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}{% endfor %}"
    )

    def written(*names: str) -> str:
        calls = (
            f'<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
            for name in names
        )
        return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"

    first, second, third = "functions.add:0", "functions.get weather:1", "functions.add:2"
    renderer = renderer_of(template)
    assert renderer.chat(CALLED) == (
        f"Hi{written(first, second)}Wet of {second};2 of {first};{written(third)}3 of {third};"
    )
    own = [{**call, "id": f"functions.{call['function']['name']}:7"} for call in CALLS[:1]]
    assert written("functions.add:7") in renderer.chat([{**CALLED[1], "tool_calls": own}])


def test_f67_arguments_are_text_where_a_mapping_escapes_the_markup_around_it() -> None:
    """What jinja's filter `safe` returns escapes the texts to which it is added."""
    template = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
{%- set a = c.function.arguments %}
{%- if a is not string %}{% set a = a | tojson | safe %}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + a + '}' }}{% endfor %}{% endfor %}"""
    text = renderer_of(template).chat(CALLED)
    assert text.startswith('Hi{"name": "add", "arguments": {"a": 1}}{"name": "get weather"')


def test_f67_a_model_that_always_thinks_renders_a_chat_without_a_choice() -> None:
    """Its template refuses to leave out thinking, which is else the default."""
    refused = "{% if enable_thinking is false %}{{ raise_exception('Never.') }}{% endif %}"
    chosen = "{% if enable_thinking is false %}quick:{% endif %}"
    chat = [{"role": "user", "content": "Hi"}]
    assert renderer_of(refused + ALL).chat(chat) == "[user]Hi"
    assert renderer_of(chosen + ALL).chat(chat) == "quick:[user]Hi"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ p.type }}", "['string', 'null']"),
        ("{{ p.description + (p.type | string) }}", "['string', 'null']"),
        ("{{ p.type + '.' }}", "string."),
        ("{{ p.description + p.type + '.' }}", "string."),
    ],
)
def test_f67_a_tool_is_changed_only_as_the_template_needs(written: str, expected: str) -> None:
    """Command R+ reads the description of each argument, and takes no list of types."""
    each = "{% for p in tool.function.parameters.properties.values() %}"
    template = f"{{% for tool in tools %}}{each}({written}){{% endfor %}}{{% endfor %}}{ALL}"
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = renderer_of(template).chat([{"role": "user", "content": "Hi"}], [tool])
    assert text == f"({expected})[user]Hi"
