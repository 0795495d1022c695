"""Bodies of requests: their bounds, and messages, of which equal ones give equal prompts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.openai import normalise


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_developer_becomes_system_and_system_is_hoisted_and_merged() -> None:
    given_messages = [
        message("user", "Hi"),
        message("system", "Be brief."),
        message("assistant", "Hello"),
        message("developer", "Be kind."),
    ]
    assert normalise(given_messages) == [
        message("system", "Be brief.\n\nBe kind."),
        message("user", "Hi"),
        message("assistant", "Hello"),
    ]


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


def test_adjacent_plain_messages_of_one_role_merge() -> None:
    assert normalise([message("user", "a"), message("user", "b"), message("assistant", "c")]) == [
        message("user", "a\n\nb"),
        message("assistant", "c"),
    ]


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


def test_a_null_field_does_not_prevent_a_merge() -> None:
    assert normalise([message("user", "a", name=None), message("user", "b")]) == [
        message("user", "a\n\nb")
    ]


def test_content_parts_of_system_messages_stay_parts() -> None:
    part = {"type": "text", "text": "b"}
    assert normalise([message("system", "a"), message("system", [part])]) == [
        message("system", [{"type": "text", "text": "a"}, part])
    ]


def test_normalisation_does_not_change_its_argument() -> None:
    given_messages = [message("user", "a"), message("user", "b"), message("system", "s")]
    normalise(given_messages)
    assert given_messages == [message("user", "a"), message("user", "b"), message("system", "s")]


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
CONTENTS = st.text("ab", max_size=3) | st.just([{"type": "text", "text": "p"}])
MESSAGES = st.lists(st.builds(message, ROLES, CONTENTS), max_size=8)


@given(MESSAGES)
def test_normalisation_is_idempotent(messages: list[dict[str, Any]]) -> None:
    normalised = normalise(messages)
    assert normalise(normalised) == normalised


@given(MESSAGES)
def test_system_comes_first_and_only_once(messages: list[dict[str, Any]]) -> None:
    roles = [item["role"] for item in normalise(messages)]
    assert "developer" not in roles
    assert "system" not in roles[1:]
    plain = [item["role"] for item in normalise(messages) if isinstance(item["content"], str)]
    assert set(plain) <= {"system", "user", "assistant", "tool"}


def test_an_answer_that_ended_inside_its_reasoning_comes_back() -> None:
    ended = message("assistant", None, reasoning_content="Hm")
    assert normalise([message("user", "?"), ended])[1] == {**ended, "content": ""}
    called = message("assistant", None, tool_calls=[{}])
    assert normalise([called]) == [called]
