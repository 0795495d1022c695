"""Values of any shape that a document may contain."""

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=10,
)
"""Without null, which removes a field in a patch."""
ODD: tuple[Any, ...] = (7, True, "x", [7], {"a": []}, [[]], [None], {"type": []}, 10**400, 1e999)


def with_odd_values(value: Any) -> Iterator[Any]:
    """Yield copies of a JSON value with one part replaced."""
    yield from ODD
    if not isinstance(value, dict | list):
        return
    names = list(value) if isinstance(value, dict) else range(len(value))
    for name in names:
        part = value[name]
        for other in with_odd_values(part):
            copy = value.copy()
            copy[name] = other
            yield copy
