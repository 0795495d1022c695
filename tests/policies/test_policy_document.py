"""The policy document: what is taken, and how a mistake is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.document import (
    PolicyInvalid,
    Priority,
    Queue,
    load_policy,
    read_policy,
    shipped_policy,
)

GOOD: dict[str, Any] = {
    "version": 1,
    "models": {"demo": {"aliases": ["default"], "sampling": {"temperature": 0.5}}},
    "routes": [
        {"name": "media", "when": {"media": True}, "to": ["vlm"]},
        {"name": "rest", "to": ["vlm"]},
    ],
    "pools": {"vlm": {"lanes": ["vlm"]}},
}


def changed(*path: Any, to: Any) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return document


def test_the_shipped_policy_is_the_one_of_the_design() -> None:
    policy = shipped_policy()
    assert [(route.name, route.to) for route in policy.routes] == [
        ("pictures", ("vlm",)),
        ("greedy-text", ("text-mtp", "vlm")),
        ("everything-else", ("vlm",)),
    ]
    assert [route.spill and route.spill.after_wait_ms for route in policy.routes] == [
        None,
        250,
        None,
    ]
    assert {pool.queue for pool in policy.pools.values()} == {Queue()}, "as said, the defaults"
    assert policy.priorities == tuple(Priority)
    assert policy.models["demo"].aliases == ("default", "gpt-4o-mini")
    assert policy.models["demo"].sampling.defaults.temperature == 1.0


def test_every_line_of_the_shipped_policy_is_explained() -> None:
    lines = (Path(__file__).parents[2] / "policies" / "default.yaml").read_text().splitlines()
    told = [line for line in lines if line.strip()]
    assert [line for line in told if "#" not in line] == []


@pytest.mark.parametrize(
    ("document", "field", "what"),
    [
        (changed("version", to=2), "version", "1"),
        (changed("rotues", to=[]), "rotues", "no such field"),
        (changed("routes", 0, "when", "colour", to=1), "routes.0.when.colour", "no such field"),
        (changed("routes", 0, "when", "media", to="yes"), "routes.0.when.media", "boolean"),
        (changed("routes", to=[]), "routes", "at least 1"),
        (changed("routes", 1, "to", to=[]), "routes.1.to", "at least 1"),
        (changed("routes", 1, "to", to=["fast"]), "routes.1.to.0", "there is no pool 'fast'"),
        (changed("routes", 1, "name", to="media"), "routes.1.name", "'media' is used twice"),
        (changed("routes", 0, "when", to={}), "routes.0", "it takes every request"),
        (changed("routes", 1, "when", to={"greedy": True}), "routes.1.when", "the last route"),
        (
            changed("routes", 0, "when", to={"model": "default"}),
            "routes.0.when.model",
            "'default' is an alias",
        ),
        (
            changed("models", "other", to={"aliases": ["default"]}),
            "models.other.aliases.0",
            "already means 'demo'",
        ),
        (
            changed("models", "default", to={}),
            "models.demo.aliases.0",
            "'default' is a model of its own",
        ),
        (
            changed("models", "demo", "sampling", "temperature", to=3),
            "models.demo.sampling.temperature",
            "2",
        ),
        (changed("models", "demo", "sampling", "top_p", to=0), "models.demo.sampling.top_p", "0"),
        (changed("pools", to={}), "pools", "at least 1"),
        (changed("routes", 0, "spill", to={"after_wait_ms": 1}), "routes.0.spill", "there is no"),
        (
            changed("routes", 0, "spill", to={"after_wait_ms": -1}),
            "routes.0.spill.after_wait_ms",
            "0",
        ),
        (changed("pools", "vlm", "queue", to={"limit": -1}), "pools.vlm.queue.limit", "0"),
        (
            changed("pools", "vlm", "queue", to={"timeout_s": 0}),
            "pools.vlm.queue.timeout_s",
            "0",
        ),
        (changed("priorities", to=["urgent"]), "priorities.0", "interactive"),
        ([], "", "mapping"),
        (None, "", "mapping"),
    ],
)
def test_a_mistake_is_named_by_field(document: Any, field: str, what: str) -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(document, "mine.yaml")
    assert any(field == one.field and what in one.sentence for one in invalid.value.problems)
    assert "mine.yaml" in str(invalid.value)


def test_two_mistakes_are_both_named() -> None:
    document = changed("version", to=2)
    document["x"] = 1
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(document, "mine.yaml")
    assert {problem.field for problem in invalid.value.problems} == {"version", "x"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"a: [", "it is not YAML"),
        (b"!!python/object:os.system {}", "it is not YAML"),
        (b"\xff\xfe\xff", "the file cannot be read"),
        (b"", "it must be a mapping"),
    ],
)
def test_a_file_that_is_no_policy_is_refused_by_name(
    tmp_path: Path, text: bytes, sentence: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text)
    with pytest.raises(PolicyInvalid, match=sentence) as invalid:
        load_policy(file)
    assert str(file) in str(invalid.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        PolicyInvalid, match=r"nothing\.yaml is not usable: the file cannot be read"
    ):
        load_policy(tmp_path / "nothing.yaml")


def test_json_is_taken_as_well_as_yaml(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(yaml.safe_dump(GOOD, default_flow_style=True))
    assert load_policy(file) == read_policy(GOOD, "x")
