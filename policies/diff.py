"""Differences between two documents, and JSON Merge Patch (RFC 7396)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = object()
"""A marker for an absent value, because null is a value."""


def diff(old: Any, new: Any) -> list[dict[str, Any]]:
    """Return the differences, in the order of the documents: field, old and new value, if any.

    Named entries of a list (routes) are compared by name, not by index: a new first route is one
    difference, not one in every route.
    """
    return [
        {"field": field} | {side: one for side, one in sides.items() if one is not ABSENT}
        for field, sides in _compare("", old, new)
    ]


def _compare(field: str, old: Any, new: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _compare_entries(field, old, new)
    elif (olds := _by_name(old)) is not None and (news := _by_name(new)) is not None:
        yield from _compare_entries(field, olds, news)
        common = [name for name in olds if name in news]
        if common != [name for name in news if name in olds]:
            yield field, {"old": list(olds), "new": list(news)}
    elif not _same(old, new):
        yield field, {"old": old, "new": new}


def _compare_entries(
    field: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in {**old, **new}:
        where = f"{field}.{name}" if field else name
        yield from _compare(where, old.get(name, ABSENT), new.get(name, ABSENT))


def _same(old: Any, new: Any) -> bool:
    """Return whether two values are equal in JSON; in Python, True equals 1 at any depth."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(old[name], new[name]) for name in old)
    return bool(old == new) and isinstance(old, bool) == isinstance(new, bool)


def _by_name(value: Any) -> dict[str, Any] | None:
    """Return the entries of a list by name, or None unless each has a unique name."""
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        return None
    named = {str(entry["name"]): entry for entry in value if "name" in entry}
    return named if len(named) == len(value) else None


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the patched target: null removes a field, a list is replaced as a whole."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged
