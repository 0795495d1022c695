"""Bodies of requests: their bounds, and messages, of which equal ones give equal prompts."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.openai import normalise


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


PART = {"type": "text", "text": "b"}


@pytest.mark.parametrize(
    ("given_messages", "expected"),
    [
        (
            [("user", "Hi"), ("system", "Be"), ("assistant", "Hello"), ("developer", "kind.")],
            [("system", "Be\n\nkind."), ("user", "Hi"), ("assistant", "Hello")],
        ),
        (
            [("user", "a"), ("user", "b"), ("assistant", "c")],
            [("user", "a\n\nb"), ("assistant", "c")],
        ),
        ([("system", "a"), ("system", [PART])], [("system", [{**PART, "text": "a"}, PART])]),
    ],
    ids=["developer becomes system, which comes first", "adjacent texts of a role", "parts"],
)
def test_plain_messages_of_a_role_merge(given_messages: list[Any], expected: list[Any]) -> None:
    messages = [message(*one, name=None) for one in given_messages]
    before = copy.deepcopy(messages)
    merged = normalise(messages)
    assert [(one["role"], one["content"]) for one in merged] == expected
    assert messages == before


def test_a_system_message_behind_others_stays_in_its_place_for_workers_that_tell() -> None:
    given_messages = [
        message("system", "Be brief."),
        message("developer", "Be kind."),
        message("user", "Hi"),
        message("assistant", "Hello"),
        message("developer", "It is late."),
        message("user", "And?"),
    ]
    placed = normalise(given_messages, in_place=True)
    assert placed == [
        message("system", "Be brief.\n\nBe kind."),
        *given_messages[2:4],
        message("system", "It is late."),
        message("user", "And?"),
    ]
    assert normalise(placed, in_place=True) == placed
    assert normalise(given_messages[:2], in_place=True) == placed[:1]


def test_messages_with_more_than_text_never_merge() -> None:
    call = message("assistant", "x", tool_calls=[{"id": "1"}])
    parts = message("user", [{"type": "text", "text": "x"}])
    named = message("user", "x", name="ann")
    tool = message("tool", "4", tool_call_id="1")
    for special in (call, parts, named, tool):
        plain = message(special["role"], "plain")
        assert normalise([special, plain]) == [special, plain]
        assert normalise([plain, special]) == [plain, special]
        assert normalise([special, special]) == [special, special]


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
CONTENTS = st.text("ab", max_size=3) | st.just([{"type": "text", "text": "p"}])
MESSAGES = st.lists(st.builds(message, ROLES, CONTENTS), max_size=8)


@given(MESSAGES)
def test_normalisation_is_idempotent_with_one_system_first(messages: list[dict[str, Any]]) -> None:
    normalised = normalise(messages)
    assert normalise(normalised) == normalised
    roles = [item["role"] for item in normalised]
    assert "system" not in roles[1:]
    assert set(roles) <= {"system", "user", "assistant", "tool"}


def test_an_answer_that_ended_inside_its_reasoning_comes_back() -> None:
    ended = message("assistant", None, reasoning_content="Hm")
    assert normalise([message("user", "?"), ended])[1] == {**ended, "content": ""}
    called = message("assistant", None, tool_calls=[{}])
    assert normalise([called]) == [called]
