"""Differences between two documents, and JSON Merge Patch (RFC 7396) with all its examples."""

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.diff import diff, merge_patch
from tests.support.json_values import VALUES

OLD: dict[str, Any] = {
    "version": 1,
    "models": {"demo": {"aliases": ["default"]}},
    "routes": [
        {"name": "pictures", "when": {"media": True}, "to": ["vlm"]},
        {"name": "rest", "to": ["vlm"]},
    ],
    "pools": {"vlm": {"lanes": ["vlm"], "queue": {"limit": 128}}},
}


def edited(*path: Any, **fields: Any) -> dict[str, Any]:
    """Return the old document with other fields at a path."""
    new = copy.deepcopy(OLD)
    parent: Any = new
    for step in path:
        parent = parent[step]
    parent.update(fields)
    return new


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (OLD, []),
        (
            edited("pools", "vlm", "queue", limit=64),
            [{"field": "pools.vlm.queue.limit", "old": 128, "new": 64}],
        ),
        (
            edited("pools", fast={"lanes": ["text-mtp"]}),
            [{"field": "pools.fast", "new": {"lanes": ["text-mtp"]}}],
        ),
        (
            {name: value for name, value in OLD.items() if name != "models"},
            [{"field": "models", "old": OLD["models"]}],
        ),
        (
            edited("models", "demo", aliases=["default", "gpt-4o"]),
            [{"field": "models.demo.aliases", "old": ["default"], "new": ["default", "gpt-4o"]}],
        ),
        (
            edited(routes=[{"name": "night", "to": ["vlm"]}, *OLD["routes"]]),
            [{"field": "routes.night", "new": {"name": "night", "to": ["vlm"]}}],
        ),
        (
            edited("routes", 1, to=["text-mtp"]),
            [{"field": "routes.rest.to", "old": ["vlm"], "new": ["text-mtp"]}],
        ),
        (
            edited(routes=OLD["routes"][::-1]),
            [{"field": "routes", "old": ["pictures", "rest"], "new": ["rest", "pictures"]}],
        ),
        (edited(version=True), [{"field": "version", "old": 1, "new": True}]),
    ],
)
def test_each_change_is_reported_once_with_its_field(new: Any, expected: Any) -> None:
    assert diff(OLD, new) == expected


@given(VALUES, VALUES)
@example([False], [0])
@example([[{"a": 1}]], [[{"a": True}]])
@example([{"a": 1}], [{"a": 1, "b": 2}])
@example([{"a": 1, "b": 2}], [{"a": 1}])
def test_only_different_documents_have_differences(old: Any, new: Any) -> None:
    assert not diff(old, old)
    written = [json.dumps(value, sort_keys=True) for value in (old, new)]
    assert bool(diff(old, new)) == (written[0] != written[1])


# Appendix A of the RFC: original, patch, result.
EXAMPLES = [
    ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
    ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
    ('{"a":"b"}', '{"a":null}', "{}"),
    ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
    ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
    ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
    ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
    ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
    ('["a","b"]', '["c","d"]', '["c","d"]'),
    ('{"a":"b"}', '["c"]', '["c"]'),
    ('{"a":"foo"}', "null", "null"),
    ('{"a":"foo"}', '"bar"', '"bar"'),
    ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
    ("[1,2]", '{"a":"b","c":null}', '{"a":"b"}'),
    ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
]


@pytest.mark.parametrize(("original", "patch", "result"), EXAMPLES)
def test_the_examples_of_the_rfc_give_its_results(original: str, patch: str, result: str) -> None:
    assert merge_patch(json.loads(original), json.loads(patch)) == json.loads(result)


MAPPINGS = st.dictionaries(st.text("ab"), VALUES, max_size=3)


@given(MAPPINGS, MAPPINGS)
def test_a_patch_can_change_any_mapping_into_any_other(old: Any, new: Any) -> None:
    before = json.dumps(old)
    assert merge_patch(old, _patch(old, new)) == new
    assert json.dumps(old) == before, "the original is unchanged"


def _patch(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    removed = {name: None for name in old if name not in new}
    return removed | {name: _patch(old.get(name), value) for name, value in new.items()}
