"""The place of a fault in a schema, found by a compiler that only says why it refuses one."""

from typing import Any

import pytest

from workers.engine.text.schema_fault import fault_path

BAD = {"type": "strin"}
FINE = {"type": "string"}


def reason_of(schema: Any) -> str:
    """Refuse what has a bad type or a `not` where references lead, as llguidance does."""
    pending, seen = [schema], []
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if node.get("type") == "strin":
                return "The value of 'type' is invalid."
            if "not" in node:
                return "The worker does not support the keyword 'not'."
            names = str(node.get("$ref", "")).split("/")[1:]
            target = schema
            for name in names:
                target = target.get(name, {}) if isinstance(target, dict) else {}
            if names and target not in seen:
                seen.append(target)
                pending.append(target)
            pending += [value for key, value in node.items() if key != "$defs"]
        elif isinstance(node, list):
            pending += node
    return ""


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (BAD, ["type"]),
        (
            {"properties": {"a": FINE, "n": BAD}, "required": ["a", "n"]},
            ["properties", "n", "type"],
        ),
        ({"anyOf": [FINE, {"items": BAD}]}, ["anyOf", 1, "items", "type"]),
        ({"properties": {"n": {"not": {"anyOf": [FINE]}}}}, ["properties", "n", "not"]),
        ({"properties": {"type": {"items": BAD}}}, ["properties", "type", "items", "type"]),
        ({"$ref": "#/$defs/D", "$defs": {"D": {"items": BAD}}}, ["$defs", "D", "items", "type"]),
        (
            {"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"$ref": "#/$defs/B"}, "B": BAD}},
            ["$defs", "B", "type"],
        ),
    ],
)
def test_the_path_ends_at_the_keyword_at_fault(schema: Any, path: list[Any]) -> None:
    assert fault_path(schema, reason_of(schema), reason_of) == path


def test_references_in_a_circle_end() -> None:
    circle = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert fault_path(circle, "bad", lambda _: "") == ["$defs", "A"]
