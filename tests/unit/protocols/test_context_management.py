"""Anthropic's `context_management`: what an edit clears, and what it keeps."""

from typing import Any

import pytest

from gateway.protocols.messages.context_management import CLEARED, edit_messages
from paceline.request.fields import FieldError

TOOL_USES = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"


def turn(index: int, name: str = "read") -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": f"call{index:05}", "name": name, "input": {"file": "x" * 50}}
    thought = {"type": "thinking", "thinking": f"Thought {index}.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "line " * 100}
    return [
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result]},
    ]


CONVERSATION = [{"role": "user", "content": "Go."}, *(one for i in range(5) for one in turn(i))]


def edit(*edits: dict[str, Any], messages: list[Any] = CONVERSATION) -> Any:
    return edit_messages({"edits": list(edits)}, messages)


def results(messages: Any) -> list[str]:
    return [
        block["content"]
        for message in messages
        for block in message["content"]
        if isinstance(block, dict) and block["type"] == "tool_result"
    ]


def inputs(messages: Any) -> list[Any]:
    """Return the inputs of the tools that assistants use."""
    return [one["content"][2]["input"] for one in messages if one["role"] == "assistant"]


def uses(name: str, value: int) -> dict[str, Any]:
    return {"type": name, "value": value}


def test_old_results_are_cleared_and_the_last_ones_kept() -> None:
    trigger = uses("tool_uses", 4)
    edited, applied = edit({"type": TOOL_USES, "trigger": trigger})
    assert results(edited) == [CLEARED] * 2 + ["line " * 100] * 3
    assert inputs(edited) == inputs(CONVERSATION)
    (one,) = applied
    assert (one["type"], one["cleared_tool_uses"]) == (TOOL_USES, 2)
    assert 150 < one["cleared_input_tokens"] < 260
    again, applied = edit({"type": TOOL_USES, "trigger": trigger}, messages=edited)
    assert (again, applied) == (edited, [])


def test_an_edit_waits_for_its_trigger() -> None:
    for trigger in (uses("tool_uses", 5), uses("input_tokens", 10_000), None):
        waiting = {"trigger": trigger} if trigger else {}
        assert edit({"type": TOOL_USES, **waiting}) == (CONVERSATION, [])
    edited = edit({"type": TOOL_USES, "trigger": uses("input_tokens", 500)})
    assert results(edited[0])[0] == CLEARED


@pytest.mark.parametrize(("least", "clears"), [(5000, False), (100, True)])
def test_too_small_an_edit_clears_nothing(least: int, clears: bool) -> None:
    fields = {"type": TOOL_USES, "trigger": uses("tool_uses", 1)}
    edited, applied = edit({**fields, "clear_at_least": uses("input_tokens", least)})
    assert (edited != CONVERSATION, bool(applied)) == (clears, clears)


def test_excluded_tools_keep_their_results_and_inputs_go_if_asked() -> None:
    messages = [*turn(0), *turn(1, "search"), *turn(2)]
    none = uses("tool_uses", 0)

    def edited(**fields: Any) -> Any:
        clear = {"type": TOOL_USES, "trigger": none, "keep": none, **fields}
        return edit(clear, messages=messages)[0]

    assert results(edited(exclude_tools=["search"])) == [CLEARED, "line " * 100, CLEARED]
    kept = [bool(one) for one in inputs(edited(clear_tool_inputs=["search"]))]
    assert kept == [True, False, True]
    assert not any(inputs(edited(clear_tool_inputs=True)))


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({}, [4]),
        ({"keep": {"type": "thinking_turns", "value": 2}}, [3, 4]),
        ({"keep": "all"}, [0, 1, 2, 3, 4]),
        ({"keep": {"type": "all"}}, [0, 1, 2, 3, 4]),
    ],
)
def test_old_reasoning_is_cleared(keep: dict[str, Any], kept: list[int]) -> None:
    edited, applied = edit({"type": THINKING, **keep})
    turns = edited[1::2]
    thinking = [i for i, one in enumerate(turns) if one["content"][0]["type"] == "thinking"]
    assert thinking == kept
    assert [one["cleared_thinking_turns"] for one in applied] == [5 - len(kept)] * (len(kept) < 5)


def test_a_conversation_is_not_compacted() -> None:
    assert edit({"type": "compact_20260112"}) == (CONVERSATION, [])
    with pytest.raises(FieldError, match="does not compact"):
        edit({"type": "compact_20260112", "trigger": uses("input_tokens", 100)})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "context_management"),
        ({"edits": [{"type": "clear_all"}]}, "context_management.edits.0"),
        ({"edits": [{"type": THINKING}] * 9}, "context_management.edits"),
        (
            {"edits": [{"type": TOOL_USES, "keep": uses("tool_uses", -1)}]},
            f"context_management.edits.0.{TOOL_USES}.keep.value",
        ),
    ],
)
def test_an_invalid_edit_is_named(given: Any, param: str) -> None:
    with pytest.raises(FieldError) as invalid:
        edit_messages(given, CONVERSATION)
    assert invalid.value.param == param
