"""The policy document: accepted values, and errors that name the field and the line."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.request.profile import Priority
from policies.document import PolicyInvalid, default_policy, parse_policy, read_policy
from policies.routes import Spill
from policies.sections import Queue

VALID: dict[str, Any] = {
    "version": 1,
    "models": {"demo": {"aliases": ["default"], "sampling": {"temperature": 0.5}}},
    "routes": [
        {"name": "media", "when": {"media": True}, "to": ["vlm"]},
        {"name": "rest", "to": ["vlm"]},
    ],
    "pools": {"vlm": {"lanes": ["vlm"]}},
}


def changed(path: str, to: Any) -> dict[str, Any]:
    """Return the valid document with another value at a path, which names the routes."""
    document = copy.deepcopy(VALID)
    *parents, last = path.split(".")
    parent: Any = document
    for step in parents:
        if isinstance(parent, list):
            (parent,) = [one for one in parent if one["name"] == step]
        else:
            parent = parent.setdefault(step, {})
    parent[last] = to
    return document


def test_the_default_policy_has_the_documented_routes_and_limits() -> None:
    """And each of its lines has a comment."""
    lines = (Path(__file__).parents[3] / "policies" / "default.yaml").read_text().splitlines()
    assert [line for line in lines if line.strip() and "#" not in line] == []
    policy = default_policy()
    assert [(route.name, route.to, route.spill) for route in policy.routes] == [
        ("embeddings", ("embeddings",), None),
        ("rerank", ("rerank",), None),
        ("pictures", ("vlm",), None),
        ("greedy-text", ("text-mtp", "vlm"), Spill(after_wait_ms=250)),
        ("everything-else", ("vlm",), None),
    ]
    defaults = {pool.queue for pool in policy.pools.values()}
    assert defaults == {Queue()}, "the comments say that these are the defaults"
    assert policy.priorities == tuple(Priority)
    assert policy.models["demo"].aliases == ("default", "gpt-4o-mini")
    assert policy.models["demo"].sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "1"),
        ("rotues", [], "unknown field"),
        ("routes", [], "at least 1"),
        ("routes.media.when.colour", 1, "unknown field"),
        ("routes.media.when.media", "yes", "true, false, or"),
        ("routes.media.when.media", [], "some of: image"),
        ("routes.media.when.media", ["gif"], "image, video"),
        ("routes.media.when.media", None, "it is empty"),
        ("routes.media.when.stream", "no", "true or false"),
        ("routes.media.when.features", {}, "at least one feature"),
        ("routes.media.when.features.toolz", True, "unknown field"),
        ("routes.media.when.prompt_chars", {}, "'at_least', 'at_most' or both"),
        ("routes.media.when.messages", {"at_least": 3, "at_most": 2}, "is greater than 'at_most'"),
        ("routes.media.when.max_tokens.at_least", -1, "it must be at least 0"),
        ("routes.media.when.model", [], "at least 1"),
        ("routes.media.when.model", "default", "'default' is an alias"),
        ("routes.media.when.team", 7, "a list"),
        ("routes.media.when.key", "", "at least 1"),
        ("routes.media.when.header", {}, "at least 1"),
        ("routes.media.when.header.X-Tier", "gold", "letters (a to z), digits and -"),
        ("routes.media.when.header.authorization", "Bearer x", "contains a secret"),
        ("routes.media.when.hours", "6-9", "22:00-06:00"),
        ("routes.media.when.hours", 6, "22:00-06:00"),
        ("routes.media.when.hours", "24:00-06:00", "22:00-06:00"),
        ("routes.media.when.hours", "06:00-06:00", "same minute"),
        ("routes.media.when.days", "sunday", "'sun'"),
        ("routes.media.spill", {"after_wait_ms": 1}, "no second"),
        ("routes.media.spill.after_wait_ms", -1, "0"),
        ("routes.rest.to", [], "at least 1"),
        ("routes.rest.to", "fast", "there is no pool 'fast'"),
        ("routes.rest.when", {"greedy": True}, "the last route"),
        ("models.demo.sampling.temperature", 3, "2"),
        ("models.demo.sampling.top_p", 0, "0"),
        ("pools", {}, "at least 1"),
        ("pools.vlm.workers", {}, "'labels', 'models' or"),
        ("pools.vlm.weights.big", 0, "than 0"),
        ("pools.vlm.slots", 0, "1"),
        ("pools.vlm.queue.limit", -1, "0"),
        ("pools.vlm.queue.timeout_s", 0, "0"),
        ("pools.vlm.queue.timeout_s", float("inf"), "finite number"),
        ("limits.max_tokens", 0, "1"),
        ("limits.prompt_chars", 1.5, "whole number"),
        ("limits.request_timeout_s", 0, "than 0"),
        ("media.pictures", 33, "32"),
        ("media.pixels", 10**9, "64000000"),
        ("retries.share", 2, "1"),
        ("retries.at_least", -1, "0"),
    ],
)
def test_an_error_names_its_field(field: str, value: Any, message: str) -> None:
    assert_problem(changed(field, to=value), field, message)


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (changed("routes.media.when.team", to=["a", 7]), "routes.media.when.team.#2", "text"),
        (
            changed("routes.media.when.model", to=["demo", "default"]),
            "routes.media.when.model.#2",
            "'default' is an alias",
        ),
        (changed("routes.media.when", to={}), "routes.media", "it matches every request"),
        (changed("routes.rest.to", to=["fast"]), "routes.rest.to.#1", "there is no pool 'fast'"),
        (changed("routes.rest.to", to=["vlm"] * 2), "routes.rest.to.#2", "'vlm' is listed twice"),
        (changed("routes.rest.name", to="media"), "routes.media.name", "'media' is used twice"),
        (changed("routes", to=[{"to": ["vlm"]}]), "routes.#1.name", "this field is required"),
        (
            changed("models.other.aliases", to=["default"]),
            "models.other.aliases.#1",
            "already an alias of 'demo'",
        ),
        (changed("models.default", to={}), "models.demo.aliases.#1", "is the name of a model"),
        (changed("pools.vlm", to={}), "pools.vlm.lanes", "this field is required"),
        (
            changed("pools.vlm.workers.labels", to=["-x"]),
            "pools.vlm.workers.labels.#1",
            "digits and . _ -",
        ),
        (changed("media.kinds", to=["gif"]), "media.kinds.#1", "'image'"),
        (changed("priorities", to=["urgent"]), "priorities.#1", "interactive"),
        ([], "", "mapping"),
        (None, "", "mapping"),
    ],
)
def test_an_error_of_a_part_names_its_field(document: Any, field: str, message: str) -> None:
    assert_problem(document, field, message)


def assert_problem(document: Any, field: str, message: str) -> None:
    with pytest.raises(PolicyInvalid, match=r"policy\.yaml") as invalid:
        read_policy(document, "policy.yaml")
    problems = invalid.value.problems
    assert [one for one in problems if one.field == field and message in one.message]


def fields_of(invalid: pytest.ExceptionInfo[PolicyInvalid]) -> list[str]:
    return [problem.field for problem in invalid.value.problems]


def test_all_errors_of_shape_and_all_of_meaning_are_reported() -> None:
    shape, meaning = changed("version", to=2) | {"x": 1}, changed("routes.rest.to", to=["fast"])
    meaning["routes"][1]["name"] = "media"
    for document, fields in (
        (shape, {"version", "x"}),
        (meaning, {"routes.media.to.#1", "routes.media.name"}),
        (changed("routes", to=[{"name": "all", "to": ["vlm"], "x": 1}]), {"routes.all.x"}),
    ):
        with pytest.raises(PolicyInvalid) as invalid:
            read_policy(document, "policy.yaml")
        assert set(fields_of(invalid)) == fields


def test_of_very_many_errors_the_first_are_reported_and_the_rest_are_counted() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(changed("routes", to=[{"name": "?"}] * 1000), "policy.yaml")
    problems = invalid.value.problems
    assert len(problems) == 32
    assert problems[-1].field == "routes.#16.to"
    assert problems[-1].message == "this field is required; and 1968 more problems"


def test_a_single_name_is_accepted_for_a_list_of_names() -> None:
    single = {"team": "a", "model": "m", "days": "sat", "media": "image"}
    listed = {name: [value] for name, value in single.items()} | {"header": {"x-tier": ["gold"]}}
    documents = [
        changed("routes.media.when", to=when)
        for when in (single | {"header": {"x-tier": "gold"}}, listed)
    ]
    assert read_policy(documents[0], "x") == read_policy(documents[1], "x")
    assert read_policy(changed("routes.rest.to", to="vlm"), "x") == read_policy(VALID, "x")


def test_a_dumped_policy_is_read_as_the_same_policy() -> None:
    when = {"media": ["image"], "hours": "22:00-06:00", "days": "sat", "team": "a"}
    policy = read_policy(changed("routes.media.when", to=when), "x")
    for exclude_unset in (True, False):
        dumped = policy.model_dump(mode="json", exclude_unset=exclude_unset)
        assert read_policy(dumped, "x") == policy
    assert "stream" not in dumped["routes"][0]["when"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not closed"),
        ("!!python/object:os.system {}", "a policy cannot have tags"),
        ("", "it must be a mapping"),
    ],
)
def test_a_text_that_is_no_policy_is_rejected_by_its_file(text: str, sentence: str) -> None:
    with pytest.raises(PolicyInvalid, match=rf"policy\.yaml is invalid: .*{sentence}"):
        parse_policy(text, "policy.yaml")


def test_json_is_accepted_as_well_as_yaml() -> None:
    assert parse_policy(json.dumps(VALID), "policy.json") == read_policy(VALID, "x")


POLICY_TEXT = """\
version: 1
routes:
  - name: media
    when: {media: true}
    to:
      - vlm
      - fast
  - name: rest
    to: [vlm]
    colour: red
pools:
  vlm: {lanes: [vlm]}
"""


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (
            POLICY_TEXT.replace("name: media", "nam: media"),
            r"line 3: routes\.#1\.nam: .*line 10: routes\.rest\.colour: unknown field",
        ),
        (
            POLICY_TEXT.replace("    colour: red\n", ""),
            r"line 7: routes\.media\.to\.#2: there is no pool 'fast'",
        ),
        (POLICY_TEXT + "pools: {}\n", "line 13: 'pools' is a duplicate key"),
    ],
)
def test_errors_in_a_text_are_listed_in_order_of_their_lines(text: str, problems: str) -> None:
    with pytest.raises(PolicyInvalid, match=f"(?s){problems}"):
        parse_policy(text, "policy.yaml")


MISSPELT = """\
version: 1
models:
  m: {aliases: [d], samplin: {temperature: 0}}
routes:
  - name: media
    when: {mdeia: true, features: {toolz: true}}
    too: [vlm]
  - name: rest
    to: [vlm]
pools:
  vlm: {lane: [vlm], queue: {timeout: 3}, colour: red}
  queue: {lanes: [vlm], wokers: {labels: [a]}}
"""


def test_a_misspelt_field_gets_a_suggestion_and_is_reported_once() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        parse_policy(MISSPELT, "policy.yaml")
    assert {str(problem) for problem in invalid.value.problems} == {
        "line 3: models.m.samplin: unknown field; did you mean 'sampling'?",
        "line 6: routes.media.when.mdeia: unknown field; did you mean 'media'?",
        "line 6: routes.media.when.features.toolz: unknown field; did you mean 'tools'?",
        "line 7: routes.media.too: unknown field; did you mean 'to'?",
        "line 11: pools.vlm.lane: unknown field; did you mean 'lanes'?",
        "line 11: pools.vlm.queue.timeout: unknown field; did you mean 'timeout_s'?",
        "line 11: pools.vlm.colour: unknown field",
        "line 12: pools.queue.wokers: unknown field; did you mean 'workers'?",
    }


def test_a_misspelt_pool_gets_a_suggestion_and_a_long_name_is_shortened() -> None:
    for to in ("vml", ["vml"]):
        with pytest.raises(PolicyInvalid, match="no pool 'vml'; did you mean 'vlm'"):
            read_policy(changed("routes.rest.to", to=to), "policy.yaml")
    with pytest.raises(PolicyInvalid, match=r"\A.{,300}\Z"):
        read_policy({**VALID, "x" * 100_000: 1}, "policy.yaml")
