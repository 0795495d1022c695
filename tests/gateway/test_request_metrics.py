"""Each answer can tell what drafting did for it: to whom is a matter of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.sections import MetricsRules
from tests.support.policies import gateway_with
from tests.support.running_gateway import Gateway
from tests.support.scripted_worker import METRICS, USAGE, FakeWorker

ASKED = {"metrics": "summary"}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def trailing(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """Return the last chunk of a stream if it is one that has no choices, else nothing."""
    with gateway.stream(**fields) as answer:
        text = answer.read().decode()
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert events[-1] == "[DONE]"
    last: dict[str, Any] = json.loads(events[-2])
    return {} if last["choices"] else last


@pytest.mark.parametrize(
    ("told", "fields", "expected"),
    [
        ("asked", {}, False),
        ("asked", ASKED, True),
        ("with_usage", {}, True),
        ("with_usage", ASKED, True),
        ("always", {}, True),
    ],
)
def test_a_whole_answer_tells_when_asked_or_when_the_policy_says_so(
    tmp_path: Path, worker: FakeWorker, told: str, fields: dict[str, Any], expected: bool
) -> None:
    with gateway_with(tmp_path, worker, metrics={"told": told}) as gateway:
        answer = gateway.chat(**fields).json()
        assert answer.get("metrics") == (METRICS if expected else None)
        assert ("metrics" in answer, answer["usage"]) == (expected, USAGE)
        assert answer["choices"][0]["message"]["content"] == "one two three"
        assert gateway.status()["recent"]["mtp"]["accepted"] == 1, "counted all the same"


@pytest.mark.parametrize(
    ("told", "fields", "expected"),
    [
        ("asked", {}, (False, False)),
        ("asked", ASKED, (True, True)),
        ("asked", WITH_USAGE, (True, False)),
        ("asked", {**ASKED, **WITH_USAGE}, (True, True)),
        ("with_usage", {}, (False, False)),
        ("with_usage", ASKED, (True, True)),
        ("with_usage", WITH_USAGE, (True, True)),
        ("always", {}, (True, True)),
    ],
)
def test_a_stream_tells_in_its_last_chunk_when_asked_or_when_the_policy_says_so(
    tmp_path: Path,
    worker: FakeWorker,
    told: str,
    fields: dict[str, Any],
    expected: tuple[bool, bool],
) -> None:
    """Expected are usage, and metrics beside it."""
    usage, metrics = expected
    with gateway_with(tmp_path, worker, metrics={"told": told}) as gateway:
        last = trailing(gateway, **fields)
        assert last.get("usage") == (USAGE if usage else None)
        assert last.get("metrics") == (METRICS if metrics else None)
        assert gateway.status()["recent"]["mtp"]["accepted"] == 1, "counted all the same"


def test_the_shipped_policy_tells_wherever_it_tells_usage(line: Gateway) -> None:
    assert MetricsRules().told == "with_usage"
    assert line.chat().json()["metrics"] == METRICS
    assert trailing(line) == {}
    assert trailing(line, **WITH_USAGE)["metrics"] == METRICS


@pytest.mark.parametrize(
    "nonsense",
    [
        5,
        {"speculative_decoding": 5},
        {"speculative_decoding": {"num_spec_steps": "many", "num_draft_tokens": -4}},
        {"speculative_decoding": {"num_draft_tokens": 1, "num_accepted_draft_tokens": 2}},
        {"speculative_decoding": {"num_spec_steps": 10**30, "acceptance_histogram": [None, "x"]}},
    ],
)
def test_nonsense_of_a_worker_breaks_no_answer_and_no_count(
    line: Gateway, worker: FakeWorker, nonsense: Any
) -> None:
    worker.script.body = json.dumps(
        {"choices": [{"message": {"content": "x"}}], "usage": USAGE, "metrics": nonsense}
    ).encode()
    assert line.chat(temperature=0).json()["metrics"] == nonsense
    mtp = line.status()["recent"]["mtp"]
    assert mtp["attempted"] == mtp["accepted"] + mtp["rejected"] + mtp["errors"]
