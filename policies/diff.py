"""What two documents say differently, field by field, as a person would tell it.

JSON Merge Patch (RFC 7396): a document with some of it changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ABSENT = object()
"""In place of a value where there is none; null would be one."""


class Difference(NamedTuple):
    """One field, and what it says in the one document and in the other."""

    field: str
    old: Any
    new: Any

    def to_json(self) -> dict[str, Any]:
        """Tell it as JSON; what is absent is left out."""
        sides = {"old": self.old, "new": self.new}
        return {"field": self.field} | {
            side: value for side, value in sides.items() if value is not ABSENT
        }


def diff(old: Any, new: Any) -> tuple[Difference, ...]:
    """List what differs, in the order of the documents.

    Entries of a list that have names (routes) are compared by name, not by place: a new first route
    is one difference, not one in each.
    """
    return tuple(_compare("", old, new))


def _compare(field: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _compare_entries(field, old, new)
    elif (olds := _by_name(old)) is not None and (news := _by_name(new)) is not None:
        yield from _compare_entries(field, olds, news)
        stayed = [name for name in olds if name in news]
        if stayed != [name for name in news if name in olds]:
            yield Difference(field, list(olds), list(news))
    elif not _same(old, new):
        yield Difference(field, old, new)


def _compare_entries(
    field: str, old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterator[Difference]:
    for name in {**old, **new}:
        where = f"{field}.{name}" if field else name
        yield from _compare(where, old.get(name, ABSENT), new.get(name, ABSENT))


def _same(old: Any, new: Any) -> bool:
    """Say whether two values are the same in JSON: to Python True is 1, also within a list."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_same(old[name], new[name]) for name in old)
    return bool(old == new) and isinstance(old, bool) == isinstance(new, bool)


def _by_name(value: Any) -> dict[str, Any] | None:
    """Key the entries of a list by their names, where each has one of its own."""
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        return None
    named = {str(one["name"]): one for one in value if "name" in one}
    return named if len(named) == len(value) else None


def merge_patch(target: Any, patch: Any) -> Any:
    """Return the target as the patch wants it: null takes away, a list is replaced whole."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged
