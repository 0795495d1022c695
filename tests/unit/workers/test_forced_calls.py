"""Calls that a grammar forces, read from their JSON while it arrives."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tool_call_text import read_calls
from workers.server.tool_calls import FORCED_CALLS

KEYS = st.text('a"}\\', max_size=3)
JSON = st.recursive(
    st.none() | st.integers() | st.text('a"\\{}[], é', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner),
    max_leaves=5,
)
NAMES = st.text('ab"é\\', min_size=1, max_size=4)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, JSON)), min_size=1, max_size=3)


@settings(max_examples=30)
@given(CALLS, st.integers(1, 7))
def test_calls_are_the_same_however_their_text_arrives(calls: list[Any], size: int) -> None:
    """Cut anywhere, also within escapes, the names and the exact text of the arguments arrive."""
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    expected = [(name, json.dumps(arguments)) for name, arguments in calls]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for read in (read_calls(FORCED_CALLS, pieces), read_calls(FORCED_CALLS, [text])):
        assert read.calls == expected
        assert read.content == ""


def test_a_call_cut_before_its_name_is_no_text() -> None:
    assert read_calls(FORCED_CALLS, ['[{"name": "ad'], cut=True)[:2] == ("", [])
    pieces = ['[{"name": "f", "argu', 'ments": {"a']
    assert read_calls(FORCED_CALLS, pieces, cut=True).calls == [("f", '{"a')]
