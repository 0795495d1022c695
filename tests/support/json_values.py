"""Values of any shape that a document may contain."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=10,
)
"""Without null, which removes a field in a patch."""
