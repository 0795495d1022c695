"""Histories that the API allows, rendered by templates that each lack something."""

from __future__ import annotations

import logging
from random import Random

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
    "one call": (refusing_each("(m.tool_calls or [])[1] is defined"), "parallel_calls=False"),
    "no text beside calls, without a word": (
        ALL.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
        "text_with_calls='before'",
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
        "system=False system_inside=False in_text=True results_in_text=True",
    ),
}


@pytest.mark.parametrize("lacks", TEMPLATES)
def test_f67_a_history_is_changed_no_further_than_the_template_needs(
    lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No word is lost, and the log tells the changes once."""
    template, changes = TEMPLATES[lacks]
    renderer = renderer_of(template)
    with caplog.at_level(logging.INFO):
        for number in range(60):
            history = random_history(Random(f"unit {number}"))
            assert not faults(history, rendered(renderer, history)), history.messages
    told = [one.getMessage() for one in caplog.records if "histories_changed" in one.getMessage()]
    assert renderer.history_style.changes == changes
    assert len(told) == (lacks != "takes all")


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
