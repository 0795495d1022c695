"""What is published beside the document: the schema for editors, and the page for admins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policies.schema import schema

ROOT = Path(__file__).parents[2]


def fields(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """List every field that the schema names, with what it says of it."""
    if isinstance(node, dict):
        yield from node.get("properties", {}).items()
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from fields(inner)


def test_the_published_schema_is_the_documents() -> None:
    published = (ROOT / "policies" / "schema.json").read_text()
    assert published == schema(), "python -m policies.schema > policies/schema.json"


def test_editors_can_say_what_every_field_is_for() -> None:
    told = dict(fields(json.loads(schema())))
    assert {"version", "prompt_chars", "labels", "at_most", "kinds"} <= told.keys()
    assert [name for name, field in told.items() if not field.get("description")] == []


def test_editors_refuse_what_the_document_refuses() -> None:
    text = schema()
    assert '"null"' not in text
    assert text.count('"type": "object"') == text.count('"additionalProperties": false')


def test_every_reference_of_the_schema_leads_somewhere() -> None:
    made = json.loads(schema())
    assert set(re.findall(r'"#/\$defs/(\w+)"', schema())) == set(made["$defs"])


def test_the_shipped_policy_names_its_schema_first() -> None:
    first = (ROOT / "policies" / "default.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"


def test_the_page_for_admins_tells_every_field_and_shows_every_example() -> None:
    page = (ROOT / "docs" / "policy.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    assert {name for name, _ in fields(json.loads(schema()))} - named == set()
    examples = {path.name for path in (ROOT / "policies" / "examples").glob("*.yaml")}
    assert {name for name in examples if f"../policies/examples/{name}" in page} == examples
