"""The last minutes in `/v1/status`: windows, their bounds, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import validator_for

from gateway.status.model import schema
from gateway.telemetry.stats import MAX_WINDOW_S
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker, lane_report, speculation

SCHEMA = (Path(__file__).parents[3] / "docs" / "status.schema.json").read_text()
PUBLISHED = validator_for(json.loads(SCHEMA))


def paths(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """List every value of a document, and where it stands."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from paths(inner, f"{at}/{name}")
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from paths(inner, f"{at}/{index}")
    else:
        yield at, node


def test_the_published_schema_is_the_models() -> None:
    assert schema() == SCHEMA, "python -m gateway.status.model > docs/status.schema.json"


def test_the_schema_knows_no_null_and_leaves_no_field_out() -> None:
    written = json.loads(schema())
    assert "null" not in [value for at, value in paths(written) if at.endswith("/type")]
    for name, part in written["$defs"].items():
        if "properties" in part:
            assert sorted(part["required"]) == sorted(part["properties"]), name


@pytest.mark.parametrize(
    "window",
    ["", "5", "5x", "0s", "9s", "16m", "901s", "-5m", "5m ", "1e2s", "5m5s", "\u0665m", "9" * 40],
)
def test_a_window_that_is_none_or_not_kept_is_a_400_that_names_it(
    gateway_with_worker: RunningGateway, window: str
) -> None:
    response = gateway_with_worker.client.get("/v1/status", params={"window": window})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "window")


def test_there_is_one_parameter_once(gateway_with_worker: RunningGateway) -> None:
    for query in ("windw=5m", "window=5m&window=5m"):
        assert gateway_with_worker.client.get(f"/v1/status?{query}").status_code == 400


@pytest.mark.parametrize(("window", "seconds"), [("10s", 10), ("90s", 90), ("15m", 900)])
def test_a_window_says_what_was_asked_and_what_it_covers(
    gateway_with_worker: RunningGateway, window: str, seconds: float
) -> None:
    told = gateway_with_worker.client.get("/v1/status", params={"window": window}).json()["window"]
    assert (told["length_s"], told["max_length_s"]) == (seconds, MAX_WINDOW_S)
    assert told["coverage_s"] <= 10, "the gateway has just begun"


def test_every_level_tells_what_its_requests_came_to(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    lane = lane_report("text-mtp", speculation=speculation(steps=4, one=1, two=1), requests=1)
    worker.status_report = worker.report(lanes=[lane.model_dump()])
    with gateway_with_worker.stream(temperature=0) as response:
        response.read()
    gateway_with_worker.chat(temperature=0)
    gateway_with_worker.chat(temperature=0.5)
    gateway_with_worker.chat(temperature=9)
    status = gateway_with_worker.status()
    PUBLISHED.validate(status)
    worker_told = status["workers"]["fake-a"]
    for told, requests in (
        (status["recent"], 3),
        (status["models"]["demo"]["recent"], 3),
        (worker_told["recent"], 3),
        (status["pools"]["text-mtp"]["recent"], 2),
        (worker_told["lanes"]["text-mtp"]["recent"], 2),
    ):
        assert (told["requests"], told["failures"]) == (requests, 0)
        assert told["completion_tokens"] == 3 * requests
        assert told["cached_tokens"] == 2 * requests
        assert told["prefix"] == {"hit": 0, "miss": 0, "none": requests}
        assert told["duration_s"]["count"] == requests
        assert told["first_token_s"]["count"] == told["token_s"]["count"] == 1
        speed = told["request_tokens_per_s"]
        assert speed["p50"] == pytest.approx(1 / told["token_s"]["p50"])
        assert told["tokens_per_s"] > 0
        mtp = told["mtp"]
        assert (mtp["drafts"], mtp["attempted"], mtp["accepted"]) == (
            *(requests, 2 * requests, requests),
        )
        assert mtp["acceptance_rate_per_position"] == [1.0, 0.0]
    assert status["pools"]["text-mtp"]["recent"]["reasons"] == {"eligible": 2}
    assert status["pools"]["text-mtp"]["decisions"] == {"eligible": 2}
    assert status["recent"]["mtp"]["bypass_counts"] == {"non_greedy_sampling": 1}
    assert status["gateway"]["added_latency_s"]["count"] == 3
    (point,) = status["history"]
    assert (point["requests"], point["attempted"], point["acceptance_rate"]) == (3, 6, 0.5)


def test_nothing_is_null_or_missing_for_workers_that_are_gone_pools_that_are_empty_and_no_traffic(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    PUBLISHED.validate(gateway.status())
    gateway.send_heartbeat(worker)
    gateway.chat()
    gateway.remove_worker(worker)
    status = gateway.status()
    PUBLISHED.validate(status)
    assert [at for at, value in paths(status) if value is None] == []
    assert status["workers"]["fake-a"]["boot_id"] == ""
    assert status["workers"]["fake-a"]["heartbeat_age_s"] == 0
