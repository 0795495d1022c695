"""The policy document: accepted values, and errors that name the field and the line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from policies.document import PolicyInvalid, default_policy, parse_policy, read_policy
from policies.request.profile import Priority
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


def changed(*path: Any, to: Any) -> dict[str, Any]:
    document = copy.deepcopy(VALID)
    parent: Any = document
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = to
    return document


def test_the_default_policy_has_the_documented_routes_and_limits() -> None:
    policy = default_policy()
    assert [(route.name, route.to) for route in policy.routes] == [
        ("embeddings", ("embeddings",)),
        ("rerank", ("rerank",)),
        ("pictures", ("vlm",)),
        ("greedy-text", ("text-mtp", "vlm")),
        ("everything-else", ("vlm",)),
    ]
    assert [route.spill and route.spill.after_wait_ms for route in policy.routes] == [
        *(None, None, None),
        250,
        None,
    ]
    assert {pool.queue for pool in policy.pools.values()} == {Queue()}, (
        "the comments say that these are the defaults"
    )
    assert policy.priorities == tuple(Priority)
    assert policy.models["demo"].aliases == ("default", "gpt-4o-mini")
    assert policy.models["demo"].sampling.temperature == 1.0


def test_every_line_of_the_default_policy_has_a_comment() -> None:
    lines = (Path(__file__).parents[3] / "policies" / "default.yaml").read_text().splitlines()
    not_empty = [line for line in lines if line.strip()]
    assert [line for line in not_empty if "#" not in line] == []


@pytest.mark.parametrize("number", [2, 300])
def test_the_last_of_any_number_of_routes_may_match_every_request(number: int) -> None:
    media = [
        {"name": f"media-{index}", "when": {"media": True}, "to": ["vlm"]}
        for index in range(1, number)
    ]
    rest = {"name": "rest", "to": ["vlm"]}
    assert len(read_policy(changed("routes", to=[*media, rest]), "test").routes) == number


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (changed("version", to=2), "version", "1"),
        (changed("rotues", to=[]), "rotues", "unknown field"),
        (changed("routes", 0, "when", "colour", to=1), "routes.media.when.colour", "unknown field"),
        (
            changed("routes", 0, "when", "media", to="yes"),
            "routes.media.when.media",
            "true, false, or",
        ),
        (changed("routes", 0, "when", "media", to=[]), "routes.media.when.media", "some of: image"),
        (
            changed("routes", 0, "when", "media", to=["gif"]),
            "routes.media.when.media",
            "image, video",
        ),
        (changed("routes", 0, "when", "media", to=None), "routes.media.when.media", "it is empty"),
        (
            changed("routes", 0, "when", "stream", to="no"),
            "routes.media.when.stream",
            "true or false",
        ),
        (
            changed("routes", 0, "when", to={"features": {}}),
            "routes.media.when.features",
            "at least one feature",
        ),
        (
            changed("routes", 0, "when", to={"features": {"toolz": True}}),
            "routes.media.when.features.toolz",
            "unknown field",
        ),
        (
            changed("routes", 0, "when", to={"prompt_chars": {}}),
            "routes.media.when.prompt_chars",
            "'at_least', 'at_most' or both",
        ),
        (
            changed("routes", 0, "when", to={"messages": {"at_least": 3, "at_most": 2}}),
            "routes.media.when.messages",
            "'at_least' is greater than 'at_most'",
        ),
        (
            changed("routes", 0, "when", to={"max_tokens": {"at_least": -1}}),
            "routes.media.when.max_tokens.at_least",
            "it must be at least 0",
        ),
        (changed("routes", 0, "when", to={"model": []}), "routes.media.when.model", "at least 1"),
        (
            changed("pools", "vlm", "queue", to={"timeout_s": float("inf")}),
            "pools.vlm.queue.timeout_s",
            "finite number",
        ),
        (changed("routes", 0, "when", to={"team": 7}), "routes.media.when.team", "a list"),
        (changed("routes", 0, "when", to={"team": ["a", 7]}), "routes.media.when.team.#2", "text"),
        (changed("routes", 0, "when", to={"key": ""}), "routes.media.when.key", "at least 1"),
        (changed("routes", 0, "when", to={"header": {}}), "routes.media.when.header", "at least 1"),
        (
            changed("routes", 0, "when", to={"header": {"X-Tier": "gold"}}),
            "routes.media.when.header.X-Tier",
            "it must match ^[a-z0-9]",
        ),
        (
            changed("routes", 0, "when", to={"header": {"authorization": "Bearer x"}}),
            "routes.media.when.header.authorization",
            "contains a secret",
        ),
        (
            changed("routes", 0, "when", to={"hours": "6-9"}),
            "routes.media.when.hours",
            "22:00-06:00",
        ),
        (changed("routes", 0, "when", to={"hours": 6}), "routes.media.when.hours", "22:00-06:00"),
        (
            changed("routes", 0, "when", to={"hours": "24:00-06:00"}),
            "routes.media.when.hours",
            "22:00-06:00",
        ),
        (
            changed("routes", 0, "when", to={"hours": "06:00-06:00"}),
            "routes.media.when.hours",
            "same minute",
        ),
        (changed("routes", 0, "when", to={"days": "sunday"}), "routes.media.when.days", "'sun'"),
        (changed("routes", to=[]), "routes", "at least 1"),
        (changed("routes", 1, "to", to=[]), "routes.rest.to", "at least 1"),
        (changed("routes", 1, "to", to=["fast"]), "routes.rest.to.#1", "there is no pool 'fast'"),
        (changed("routes", 1, "to", to="fast"), "routes.rest.to", "there is no pool 'fast'"),
        (
            changed("routes", 1, "to", to=["vlm", "vlm"]),
            "routes.rest.to.#2",
            "'vlm' is listed twice",
        ),
        (changed("routes", 1, "name", to="media"), "routes.media.name", "'media' is used twice"),
        (changed("routes", 1, to={"to": ["vlm"]}), "routes.#2.name", "this field is required"),
        (changed("routes", 0, "when", to={}), "routes.media", "it matches every request"),
        (changed("routes", 1, "when", to={"greedy": True}), "routes.rest.when", "the last route"),
        (
            changed("routes", 0, "when", to={"model": "default"}),
            "routes.media.when.model",
            "'default' is an alias",
        ),
        (
            changed("routes", 0, "when", to={"model": ["demo", "default"]}),
            "routes.media.when.model.#2",
            "'default' is an alias",
        ),
        (
            changed("models", "other", to={"aliases": ["default"]}),
            "models.other.aliases.#1",
            "already an alias of 'demo'",
        ),
        (changed("models", "default", to={}), "models.demo.aliases.#1", "is the name of a model"),
        (
            changed("models", "demo", "sampling", "temperature", to=3),
            "models.demo.sampling.temperature",
            "2",
        ),
        (changed("models", "demo", "sampling", "top_p", to=0), "models.demo.sampling.top_p", "0"),
        (changed("pools", to={}), "pools", "at least 1"),
        (changed("pools", "vlm", to={}), "pools.vlm.lanes", "this field is required"),
        (changed("pools", "vlm", "workers", to={}), "pools.vlm.workers", "'labels', 'models' or"),
        (
            changed("pools", "vlm", "workers", to={"labels": ["-x"]}),
            "pools.vlm.workers.labels.#1",
            "it must match",
        ),
        (changed("pools", "vlm", "weights", to={"big": 0}), "pools.vlm.weights.big", "than 0"),
        (changed("pools", "vlm", "slots", to=0), "pools.vlm.slots", "1"),
        (changed("limits", to={"max_tokens": 0}), "limits.max_tokens", "1"),
        (changed("limits", to={"prompt_chars": 1.5}), "limits.prompt_chars", "whole number"),
        (changed("limits", to={"request_timeout_s": 0}), "limits.request_timeout_s", "than 0"),
        (changed("media", to={"kinds": ["gif"]}), "media.kinds.#1", "'image'"),
        (changed("media", to={"pictures": 33}), "media.pictures", "32"),
        (changed("media", to={"pixels": 10**9}), "media.pixels", "64000000"),
        (changed("retries", to={"share": 2}), "retries.share", "1"),
        (changed("retries", to={"at_least": -1}), "retries.at_least", "0"),
        (changed("routes", 0, "spill", to={"after_wait_ms": 1}), "routes.media.spill", "no second"),
        (
            changed("routes", 0, "spill", to={"after_wait_ms": -1}),
            "routes.media.spill.after_wait_ms",
            "0",
        ),
        (changed("pools", "vlm", "queue", to={"limit": -1}), "pools.vlm.queue.limit", "0"),
        (
            changed("pools", "vlm", "queue", to={"timeout_s": 0}),
            "pools.vlm.queue.timeout_s",
            "0",
        ),
        (changed("priorities", to=["urgent"]), "priorities.#1", "interactive"),
        ([], "", "mapping"),
        (None, "", "mapping"),
    ],
)
def test_an_error_names_its_field(document: Any, field: str, message: str) -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(document, "policy.yaml")
    assert [
        problem
        for problem in invalid.value.problems
        if problem.field == field and message in problem.message
    ]
    assert "policy.yaml" in str(invalid.value)


def test_two_errors_of_shape_are_both_reported() -> None:
    document = changed("version", to=2)
    document["x"] = 1
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(document, "policy.yaml")
    assert {problem.field for problem in invalid.value.problems} == {"version", "x"}


def test_two_errors_of_meaning_are_both_reported() -> None:
    document = changed("routes", 1, "to", to=["fast"])
    document["routes"][1]["name"] = "media"
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(document, "policy.yaml")
    assert {problem.field for problem in invalid.value.problems} == {
        *("routes.media.to.#1", "routes.media.name")
    }


def test_of_very_many_errors_the_first_are_reported_and_the_rest_are_counted() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(changed("routes", to=[{"name": "?"}] * 1000), "policy.yaml")
    problems = invalid.value.problems
    assert len(problems) == 32
    assert problems[-1].field == "routes.#16.to"
    assert problems[-1].message == "this field is required; and 1968 more problems"


def test_an_invalid_route_is_not_reported_as_missing() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy(changed("routes", to=[{"name": "all", "to": ["vlm"], "x": 1}]), "policy.yaml")
    assert [problem.field for problem in invalid.value.problems] == ["routes.all.x"]


def test_a_single_name_is_accepted_for_a_list_of_names() -> None:
    single = {
        "team": "a",
        "model": "m",
        "header": {"x-tier": "gold"},
        "days": "sat",
        "media": "image",
    }
    listed = {name: [value] for name, value in single.items()} | {"header": {"x-tier": ["gold"]}}
    assert read_policy(changed("routes", 0, "when", to=single), "x") == read_policy(
        changed("routes", 0, "when", to=listed), "x"
    )
    assert read_policy(changed("routes", 1, "to", to="vlm"), "x") == read_policy(VALID, "x")


def test_a_dumped_policy_is_read_as_the_same_policy() -> None:
    when = {"media": ["image"], "hours": "22:00-06:00", "days": "sat", "team": "a"}
    policy = read_policy(changed("routes", 0, "when", to=when), "x")
    for exclude_unset in (True, False):
        dumped = policy.model_dump(mode="json", exclude_unset=exclude_unset)
        assert read_policy(dumped, "x") == policy
    assert "stream" not in dumped["routes"][0]["when"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not closed"),
        ("!!python/object:os.system {}", "a policy has no tags"),
        ("", "it must be a mapping"),
    ],
)
def test_a_text_that_is_no_policy_is_rejected_with_the_name_of_its_file(
    text: str, sentence: str
) -> None:
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


def test_errors_in_a_text_are_listed_in_order_of_their_lines() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        parse_policy(POLICY_TEXT.replace("name: media", "nam: media"), "policy.yaml")
    assert [(problem.line, problem.field) for problem in invalid.value.problems] == [
        (3, "routes.#1.nam"),
        (10, "routes.rest.colour"),
    ]
    assert "line 10: routes.rest.colour: unknown field" in str(invalid.value)


def test_an_error_of_meaning_in_a_text_has_a_line() -> None:
    with pytest.raises(
        PolicyInvalid, match=r"line 7: routes\.media\.to\.#2: there is no pool 'fast'"
    ):
        parse_policy(POLICY_TEXT.replace("    colour: red\n", ""), "policy.yaml")


def test_a_duplicate_field_is_rejected() -> None:
    with pytest.raises(PolicyInvalid, match="line 13: 'pools' is a duplicate key"):
        parse_policy(POLICY_TEXT + "pools: {}\n", "policy.yaml")


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


def test_a_misspelt_pool_gets_a_suggestion() -> None:
    for to in ("vml", ["vml"]):
        with pytest.raises(PolicyInvalid, match="no pool 'vml'; did you mean 'vlm'"):
            read_policy(changed("routes", 1, "to", to=to), "policy.yaml")


def test_a_very_long_unknown_name_is_shortened() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        read_policy({**VALID, "x" * 100_000: 1}, "policy.yaml")
    assert len(str(invalid.value)) < 300
