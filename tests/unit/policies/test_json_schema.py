"""The published schema, the page for admins and the examples match the policy document."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from policies.document import PolicyInvalid, Problem, parse_policy
from policies.json_schema import schema

ROOT = Path(__file__).parents[3]


def fields(node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every field of the schema with its definition."""
    if isinstance(node, dict):
        yield from node.get("properties", {}).items()
        node = list(node.values())
    if isinstance(node, list):
        for inner in node:
            yield from fields(inner)


def test_the_published_schema_matches_the_document_and_the_default_policy_names_it() -> None:
    published = (ROOT / "policies" / "schema.json").read_text()
    assert published == schema(), "python -m policies.json_schema > policies/schema.json"
    first = (ROOT / "policies" / "default.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"


def test_every_field_of_the_schema_has_a_description() -> None:
    described = dict(fields(json.loads(schema())))
    assert {"version", "prompt_chars", "labels", "at_most", "kinds"} <= described.keys()
    assert [name for name, field in described.items() if not field.get("description")] == []


def test_the_schema_rejects_what_the_document_rejects_and_resolves_its_references() -> None:
    text = schema()
    assert '"null"' not in text
    assert text.count('"type": "object"') == text.count('"additionalProperties": false')
    assert set(re.findall(r'"#/\$defs/(\w+)"', text)) == set(json.loads(text)["$defs"])


def test_the_page_for_admins_names_every_field_and_every_example() -> None:
    page = (ROOT / "docs" / "policy.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    assert {name for name, _ in fields(json.loads(schema()))} - named == set()
    examples = {path.name for path in (ROOT / "policies" / "examples").glob("*.yaml")}
    assert {name for name in examples if f"../policies/examples/{name}" in page} == examples


def value_paths(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document."""
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield (*at, name)
            yield from value_paths(inner, (*at, name))


EXAMPLES = [yaml.safe_load(file.read_text()) for file in sorted(ROOT.glob("policies/**/*.yaml"))]
PATHS = [(n, at) for n, document in enumerate(EXAMPLES) for at in value_paths(document)]
ANY_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab:-1", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.sampled_from(PATHS), ANY_VALUES)
def test_any_value_of_a_field_is_accepted_or_rejected_with_its_line(position, value) -> None:
    example, (*outer, last) = position
    document = copy.deepcopy(EXAMPLES[example])
    parent: Any = document
    for step in outer:
        parent = parent[step]
    parent[last] = value
    problems: tuple[Problem, ...] = ()
    try:
        parse_policy(yaml.safe_dump(document), "policy.yaml")
    except PolicyInvalid as invalid:
        problems = invalid.problems
    assert all(problem.message and problem.line for problem in problems)
