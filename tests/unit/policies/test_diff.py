"""What differs between two documents, told as a person would."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import example, given

from policies.diff import differences
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


def told(change: Any) -> list[dict[str, Any]]:
    new = copy.deepcopy(OLD)
    change(new)
    return [difference.told() for difference in differences(OLD, new)]


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
def test_each_change_is_told_once_where_it_is(change: Any, expected: Any) -> None:
    assert told(change) == expected


@given(VALUES, VALUES)
@example([False], [0])
@example([[{"a": 1}]], [[{"a": True}]])
def test_nothing_is_told_of_equals_and_something_of_others(old: Any, new: Any) -> None:
    assert differences(old, old) == ()
    written = [json.dumps(value, sort_keys=True) for value in (old, new)]
    assert bool(differences(old, new)) == (written[0] != written[1])
