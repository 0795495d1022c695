"""Differences between two documents, and JSON Merge Patch (RFC 7396) with all its examples."""

from __future__ import annotations

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


def differences(change: Any) -> list[dict[str, Any]]:
    new = copy.deepcopy(OLD)
    change(new)
    return [difference.to_json() for difference in diff(OLD, new)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda new: None, []),
        (
            lambda new: new["pools"]["vlm"]["queue"].update(limit=64),
            [{"field": "pools.vlm.queue.limit", "old": 128, "new": 64}],
        ),
        (
            lambda new: new["pools"].update(fast={"lanes": ["text-mtp"]}),
            [{"field": "pools.fast", "new": {"lanes": ["text-mtp"]}}],
        ),
        (lambda new: new.pop("models"), [{"field": "models", "old": OLD["models"]}]),
        (
            lambda new: new["models"]["demo"]["aliases"].append("gpt-4o"),
            [{"field": "models.demo.aliases", "old": ["default"], "new": ["default", "gpt-4o"]}],
        ),
        (
            lambda new: new["routes"].insert(0, {"name": "night", "to": ["vlm"]}),
            [{"field": "routes.night", "new": {"name": "night", "to": ["vlm"]}}],
        ),
        (
            lambda new: new["routes"][1].update(to=["text-mtp"]),
            [{"field": "routes.rest.to", "old": ["vlm"], "new": ["text-mtp"]}],
        ),
        (
            lambda new: new["routes"].reverse(),
            [{"field": "routes", "old": ["pictures", "rest"], "new": ["rest", "pictures"]}],
        ),
        (
            lambda new: new.update(version=True),
            [{"field": "version", "old": 1, "new": True}],
        ),
    ],
)
def test_each_change_is_reported_once_with_its_field(change: Any, expected: Any) -> None:
    assert differences(change) == expected


@given(VALUES, VALUES)
@example([False], [0])
@example([[{"a": 1}]], [[{"a": True}]])
@example([{"a": 1}], [{"a": 1, "b": 2}])
@example([{"a": 1, "b": 2}], [{"a": 1}])
def test_only_different_documents_have_differences(old: Any, new: Any) -> None:
    assert diff(old, old) == ()
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
