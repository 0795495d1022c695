"""Calls that a grammar forces, read from their JSON while it arrives."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.server.tool_calls import ArgumentsText, ForcedCallReader

JSON = st.recursive(
    st.none() | st.integers() | st.text('a"\\{}[], é', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text('a"}\\', max_size=3), inner)
    ),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(
        st.text('ab"é\\', min_size=1, max_size=4), st.dictionaries(st.text(max_size=3), JSON)
    ),
    min_size=1,
    max_size=3,
)


def read(pieces: list[str]) -> list[list[str]]:
    reader = ForcedCallReader()
    calls: list[list[str]] = []
    for piece in pieces:
        for part in reader.feed(piece):
            if isinstance(part, ArgumentsText):
                calls[-1][1] += part
            else:
                assert isinstance(part, dict), "no text beside the calls"
                calls.append([part["function"]["name"], part["function"]["arguments"]])
    assert reader.close() == []
    return calls


@given(CALLS, st.integers(1, 7))
def test_calls_are_the_same_however_their_text_arrives(calls: list[Any], size: int) -> None:
    """Cut anywhere, also within escapes, the names and the exact text of the arguments arrive."""
    text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    expected = [[name, json.dumps(arguments)] for name, arguments in calls]
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(pieces) == read([text]) == expected


def test_arguments_arrive_before_their_end() -> None:
    """A client sees the arguments as the model writes them."""
    reader = ForcedCallReader()
    assert reader.feed('[{"name": "f", "argu') == []
    call, begun = reader.feed('ments": {"a": "x')
    assert isinstance(call, dict)
    assert begun == '{"a": "x'
    assert reader.feed('y"') == ['y"']
