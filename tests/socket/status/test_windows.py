"""Time windows in `/v1/status`: their limits and contents."""

from __future__ import annotations

import json
import time
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


def paths(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of a document with its path."""
    if isinstance(node, dict):
        for name, inner in node.items():
            yield from paths(inner, f"{path}/{name}")
    elif isinstance(node, list):
        for index, inner in enumerate(node):
            yield from paths(inner, f"{path}/{index}")
    else:
        yield path, node


def test_the_published_schema_is_that_of_the_model() -> None:
    assert schema() == SCHEMA, "python -m gateway.status.model > docs/status.schema.json"


def test_the_schema_has_no_null_and_requires_every_field() -> None:
    generated = json.loads(schema())
    assert "null" not in [value for path, value in paths(generated) if path.endswith("/type")]
    for name, definition in generated["$defs"].items():
        if "properties" in definition:
            assert sorted(definition["required"]) == sorted(definition["properties"]), name


@pytest.mark.parametrize(
    "window",
    ["", "5", "5x", "0s", "9s", "16m", "901s", "-5m", "5m ", "1e2s", "5m5s", "\u0665m", "9" * 40],
)
def test_an_invalid_window_returns_400_and_is_named(
    module_gateway: RunningGateway, window: str
) -> None:
    response = module_gateway.client.get("/v1/status", params={"window": window})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "window")


def test_unknown_and_duplicate_parameters_return_400(module_gateway: RunningGateway) -> None:
    for query in ("windw=5m", "window=5m&window=5m"):
        assert module_gateway.client.get(f"/v1/status?{query}").status_code == 400


@pytest.mark.parametrize(("window", "seconds"), [("10s", 10), ("90s", 90), ("15m", 900)])
def test_a_window_has_its_length_and_its_coverage(
    module_gateway: RunningGateway, window: str, seconds: float
) -> None:
    status = module_gateway.client.get("/v1/status", params={"window": window}).json()
    covered = status["window"]
    assert (covered["length_s"], covered["max_length_s"]) == (seconds, MAX_WINDOW_S)
    assert covered["coverage_s"] <= max(10, status["gateway"]["uptime_s"] + 1)


def test_every_level_has_the_figures_of_its_requests(
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
    worker_entry = status["workers"]["fake-a"]
    for recent, requests in (
        (status["recent"], 3),
        (status["models"]["demo"]["recent"], 3),
        (worker_entry["recent"], 3),
        (status["pools"]["text-mtp"]["recent"], 2),
        (worker_entry["lanes"]["text-mtp"]["recent"], 2),
    ):
        assert (recent["requests"], recent["failures"]) == (requests, 0)
        assert recent["completion_tokens"] == 3 * requests
        assert recent["cached_tokens"] == 2 * requests
        assert recent["prefix"] == {"hit": 0, "miss": 0, "none": requests, "unknown": 0}
        assert recent["duration_s"]["count"] == requests
        assert recent["first_token_s"]["count"] == recent["token_s"]["count"] == 1
        speed = recent["request_tokens_per_s"]
        assert speed["p50"] == pytest.approx(1 / recent["token_s"]["p50"])
        assert recent["tokens_per_s"] > 0
        mtp = recent["mtp"]
        drafted = (mtp["drafts"], mtp["attempted"], mtp["accepted"])
        assert drafted == (requests, 2 * requests, requests)
        assert mtp["acceptance_rate_per_position"] == [1.0, 0.0]
    assert status["pools"]["text-mtp"]["recent"]["reasons"] == {"eligible": 2}
    assert status["pools"]["text-mtp"]["decisions"] == {"eligible": 2}
    assert status["recent"]["mtp"]["bypass_counts"] == {"non_greedy_sampling": 1}
    for answers in (status["recent"], status["last_minute"]):
        assert (answers["answered"], answers["errors"]) == (4, 1)
    assert status["gateway"]["added_latency_s"]["count"] == 3
    (point,) = status["history"]
    assert (point["requests"], point["attempted"], point["acceptance_rate"]) == (3, 6, 0.5)


def test_status_has_no_null_without_traffic_workers_or_after_a_worker_left(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    PUBLISHED.validate(gateway.status())
    gateway.send_heartbeat(worker)
    gateway.chat()
    gateway.remove_worker(worker)
    status = gateway.status()
    PUBLISHED.validate(status)
    assert [path for path, value in paths(status) if value is None] == []
    assert status["workers"]["fake-a"]["boot_id"] == ""
    assert status["workers"]["fake-a"]["heartbeat_age_s"] == 0


def test_a_worker_that_is_gone_tells_why_and_since_when(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    def absence() -> dict[str, Any]:
        found: dict[str, Any] = gateway_with_worker.status()["workers"]["fake-a"]["absence"]
        return found

    assert absence() == {"kind": "", "unix_s": 0}
    began_s = time.time()
    gateway_with_worker.remove_worker(worker)
    left = absence()
    assert left["kind"] == "left"
    assert began_s - 0.01 <= left["unix_s"] <= time.time()
    gateway_with_worker.remove_worker(worker, restarting=True)
    assert absence()["kind"] == "restarting"
    gateway_with_worker.send_heartbeat(worker, boot_id="boot-2")
    assert absence() == {"kind": "", "unix_s": 0}
