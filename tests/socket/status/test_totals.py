"""`/v1/status`: its schema, its windows, and totals that agree with those of `/metrics`."""

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import validator_for
from prometheus_client.parser import text_string_to_metric_families

from gateway.fleet import health as control
from gateway.status.model import schema
from paceline.protocol import WorkerReport
from tests.support.fault_proxy import Fault
from tests.support.running_gateway import RunningGateway, running_server
from tests.support.scripted_worker import (
    Script,
    ScriptedWorker,
    chat_completion,
    lane_report,
    speculation,
)


def test_requests_without_drafting_because_it_does_not_pay_have_a_reason(gateway, worker) -> None:
    not_paying = {"draft_tokens_by_rows": (0, 0, 0, 0), "bypass_counts": {"mtp_not_paying": 3}}
    gateway.join_with(worker, lane_report("text-mtp", **not_paying))
    headers = gateway.chat(temperature=0).headers
    status = gateway.status()
    assert headers["x-paceline-reason"] == "mtp_not_paying"
    assert headers["x-paceline-pool"] == "text-mtp"
    assert status["decisions"]["bypass_counts"] == {"mtp_not_paying": 1}
    assert status["decisions"]["reasons"] == {"mtp_not_paying": 1}
    assert status["mtp"]["bypass_counts"] == {"mtp_not_paying": 3}, "the worker's own count"


def test_prefix_counts_are_summed_over_lanes_and_boots(gateway, worker) -> None:
    kinds = {"system": 200, "disk": 400}
    prefix = {"hits": 3, "misses": 1, "cached_tokens": 600, "tokens_by_kind": kinds, "too_large": 1}
    lane = lane_report("text-mtp", prefix={**prefix, "moves": {"moved": 1, "slower": 2}})
    for boot in ("one", "two"):
        worker.boot_id = boot
        gateway.join_with(worker, lane, prefix_cache_bytes=4096)
    status = gateway.status()
    entry = status["workers"]["fake-a"]
    assert entry["prefix_cache_bytes"] == 4096
    assert entry["prefix_moves"] == {"moved": 2, "slower": 4}
    assert entry["savings"]["prompt_tokens"] == 1200
    assert status["prefix"]["tokens_by_kind"] == {"system": 400, "disk": 800}
    assert status["prefix"]["not_reused"] == {"too large": 2}


def test_decisions_are_counted_by_pool_route_and_reason(gateway_with_worker) -> None:
    gateway_with_worker.chat(temperature=0)
    gateway_with_worker.chat(temperature=0)
    gateway_with_worker.chat(n=2)
    gateway_with_worker.chat(temperature=9)
    status = gateway_with_worker.status()
    assert status["decisions"] == {
        "total": 3,
        "routes": {"greedy-text": 2, "everything-else": 1},
        "reasons": {"eligible": 2, "non_greedy_sampling": 1},
        "bypass_counts": {"multiple_choices": 1, "non_greedy_sampling": 1},
    }
    assert status["outcomes"] == {"completed": 3, "refused": 1}
    assert status["errors"] == {"invalid_value": 1}
    assert status["models"]["demo"]["tokens"] == {"prompt": 21, "completion": 9, "cached": 6}
    assert status["pools"]["text-mtp"]["recent"]["duration_s"]["count"] == 2


def test_status_fetches_reports_from_workers_before_it_sums(gateway_with_worker, worker) -> None:
    lane = lane_report("text-mtp", speculation=speculation(steps=10, one=2, two=6), requests=1)
    worker.status_report = worker.report(lanes=[lane.model_dump()])
    status = gateway_with_worker.status()
    expected = {
        "enabled": True,
        "requested_draft_tokens": 2,
        "effective_draft_tokens": 2,
        "drafts": 10,
        "attempted": 20,
        "accepted": 14,
        "rejected": 6,
        "errors": 0,
        "acceptance_rate": 0.7,
        "mean_acceptance_length": 2.4,
        "acceptance_rate_per_position": [0.8, 0.6],
        "sources": {
            "head": {"attempted": 10, "accepted": 8},
            "lookup": {"attempted": 10, "accepted": 6},
        },
        "bypass_counts": {},
    }
    entry = status["workers"]["fake-a"]
    groups = (status, status["pools"]["text-mtp"], status["models"]["demo"], entry)
    for group in (*groups, entry["lanes"]["text-mtp"]):
        assert group["mtp"] == expected
    assert status["pools"]["vlm"]["mtp"] == {"enabled": False}


def test_status_uses_the_last_report_of_an_unresponsive_worker(
    gateway, worker, proxy, monkeypatch
) -> None:
    monkeypatch.setattr(control, "REPORT_TIMEOUT_S", 0.2)
    gateway.join_with(
        worker, lane_report("text-mtp", speculation=speculation(steps=10, one=2, two=6))
    )
    proxy.fault = Fault(blackhole=True)
    assert gateway.status()["mtp"]["drafts"] == 10


class CountingWorker(ScriptedWorker):
    """A worker whose counts increase with each report."""

    _reports = 0

    def report(self, **changes: Any) -> WorkerReport:
        self._reports = count = self._reports + 1
        counts = {
            "speculation": speculation(steps=4 * count, one=count, two=count),
            "prefix": {"hits": count, "misses": 1, "cached_tokens": 9 * count},
            "requests": count,
        }
        lanes = [lane_report(name, mtp_enabled=True, **counts) for name in self.lanes]
        return super().report(lanes=[lane.model_dump() for lane in lanes], **changes)


def test_every_snapshot_is_consistent_while_workers_count(gateway: RunningGateway) -> None:
    workers = [CountingWorker(worker_id=name) for name in ("one", "two")]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(3) as executor:
        for worker in workers:
            stack.enter_context(running_server(worker, sockets=[worker.socket]))
            gateway.join(worker)
        futures = [executor.submit(gateway.status) for _ in range(30)]
        for _ in range(15):
            for worker in workers:
                gateway.join(worker)
        snapshots = [future.result() for future in futures]
    for status in snapshots:
        lanes = [lane for entry in status["workers"].values() for lane in entry["lanes"].values()]
        for parts in (*(status[group].values() for group in ("workers", "pools", "models")), lanes):
            for count in ("drafts", "attempted", "accepted", "rejected", "errors"):
                assert sum(part["mtp"].get(count, 0) for part in parts) == status["mtp"][count]
        workers = status["workers"].values()
        for count in ("decode_steps", "prompt_tokens"):
            assert sum(one["savings"][count] for one in workers) == status["savings"][count]
    assert len({status["mtp"]["drafts"] for status in snapshots}) > 1


def test_an_ended_boot_contributes_only_its_counts(gateway, worker) -> None:
    counts = {"speculation": speculation(steps=3, one=1, two=1), "requests": 2}
    busy = lane_report("text-mtp", running=3, waiting=2, **counts)
    idle = lane_report("text-mtp", requested_draft_tokens=1, effective_draft_tokens=0, **counts)
    for boot, lane in (("one", busy), ("two", idle)):
        worker.boot_id = boot
        gateway.join_with(worker, lane)
    status = gateway.status()
    entry = status["workers"]["fake-a"]
    for mtp in (status["mtp"], entry["mtp"], status["pools"]["text-mtp"]["mtp"]):
        assert (mtp["requested_draft_tokens"], mtp["effective_draft_tokens"]) == (1, 0)
        assert (mtp["drafts"], mtp["accepted"]) == (6, 6)
    lane_entry = entry["lanes"]["text-mtp"]
    shown = [lane_entry[name] for name in ("running", "waiting", "slots", "requests")]
    assert shown == [0, 0, 4, 4]
    gateway.remove_worker(worker)
    entry = gateway.status()["workers"]["fake-a"]
    assert (entry["state"], entry["mtp"]["effective_draft_tokens"]) == ("gone", 0)
    assert entry["lanes"]["text-mtp"]["slots"] == 0
    assert entry["mtp"]["drafts"] == 6


def test_metrics_have_vllms_names_with_one_sample_per_worker_and_model(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    for reporting, steps in ((worker, 4), (second_worker, 6)):
        counts = speculation(steps=steps, one=1, two=1)
        gateway_with_worker.join_with(reporting, lane_report("text-mtp", speculation=counts))
    with gateway_with_worker.stream(temperature=0) as response:
        response.read()
    by_name: dict[str, list[float]] = {}
    text = gateway_with_worker.client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(sample.value)
    assert by_name["vllm:spec_decode_num_drafts_total"] == [4, 6]
    assert by_name["vllm:spec_decode_num_draft_tokens_total"] == [8, 12]
    assert by_name["vllm:spec_decode_num_accepted_tokens_total"] == [3, 3]
    assert by_name["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == [2, 1, 2, 1]
    assert by_name["paceline_requests_total"] == [1]
    assert by_name["paceline_requests_in_flight"] == [0]
    assert by_name["paceline_time_to_first_token_seconds_count"] == [1]
    assert by_name["paceline_added_latency_seconds_count"] == [1]


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


def test_the_published_schema_is_that_of_the_model_without_null_and_requires_every_field() -> None:
    assert schema() == SCHEMA, "python -m gateway.status.model > docs/status.schema.json"
    generated = json.loads(schema())
    assert "null" not in [value for path, value in paths(generated) if path.endswith("/type")]
    for name, definition in generated["$defs"].items():
        if "properties" in definition:
            assert sorted(definition["required"]) == sorted(definition["properties"]), name


@pytest.mark.parametrize(
    "window",
    ["", "5", "5x", "0s", "9s", "16m", "901s", "-5m", "5m ", "1e2s", "5m5s", "\u0665m", "9" * 40],
)
def test_an_invalid_window_or_parameter_returns_400(module_gateway, window) -> None:
    response = module_gateway.client.get("/v1/status", params={"window": window})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "window")
    for query in ("windw=5m", "window=5m&window=5m"):
        assert module_gateway.client.get(f"/v1/status?{query}").status_code == 400


@pytest.mark.parametrize("window", ["10s", "90s", "15m"])
def test_a_window_has_its_coverage(module_gateway, window) -> None:
    status = module_gateway.client.get("/v1/status", params={"window": window}).json()
    uptime_s = status["gateway"]["uptime_s"]
    assert 0 < status["window"]["coverage_s"] <= max(10, uptime_s + 1)


def test_fleet_and_pools_have_the_figures_of_their_requests(gateway_with_worker) -> None:
    with gateway_with_worker.stream(temperature=0) as response:
        response.read()
    gateway_with_worker.chat(temperature=0)
    gateway_with_worker.chat(temperature=0.5)
    gateway_with_worker.chat(temperature=9)
    status = gateway_with_worker.status()
    PUBLISHED.validate(status)
    for recent, requests in (
        (status["recent"], 3),
        (status["pools"]["text-mtp"]["recent"], 2),
    ):
        assert recent["requests"] == recent["duration_s"]["count"] == requests
        assert recent["first_token_s"]["count"] == recent["token_s"]["count"] == 1
        speed = recent["request_tokens_per_s"]
        assert speed["p50"] == pytest.approx(1 / recent["token_s"]["p50"])
    assert (status["last_minute"]["answered"], status["last_minute"]["errors"]) == (4, 1)
    assert status["gateway"]["added_latency_s"]["count"] == 3
    (point,) = status["history"]
    assert (point["requests"], point["attempted"], point["accepted"]) == (3, 6, 3)
    assert point["tokens_per_s"] > 0


@pytest.mark.parametrize(("told", "count"), [(2.5, 1), (0, 0), (None, 0), (1e9, 0), ("2", 0)])
def test_the_time_of_a_token_is_the_one_that_its_worker_tells(
    gateway_with_worker, worker, told, count
) -> None:
    answer = chat_completion("one") | {"metrics": {"mean_itl_ms": told}}
    worker.script = Script(body=json.dumps(answer).encode())
    gateway_with_worker.chat(temperature=0)
    recent = gateway_with_worker.status()["recent"]["token_s"]
    assert recent["count"] == count
    assert recent["p50"] == pytest.approx(0.0025 * count, rel=0.2)


def test_status_has_no_null_without_traffic_workers_or_after_a_worker_left(gateway, worker) -> None:
    status = gateway.status()
    PUBLISHED.validate(status)
    assert (status["store"]["kind"], status["store"]["state"]) == ("memory", "ok")
    assert status["store"]["gateways"] == 1
    gateway.join(worker)
    gateway.chat()
    gateway.remove_worker(worker)
    status = gateway.status()
    PUBLISHED.validate(status)
    assert [path for path, value in paths(status) if value is None] == []
    assert status["workers"]["fake-a"]["heartbeat_age_s"] == 0


def test_a_worker_that_is_gone_tells_why_and_since_when(gateway_with_worker, worker) -> None:
    def absence() -> dict[str, Any]:
        return gateway_with_worker.status()["workers"]["fake-a"]["absence"]

    assert absence() == {"kind": "", "unix_s": 0}
    began_s = time.time()
    gateway_with_worker.remove_worker(worker)
    left = absence()
    assert left["kind"] == "left"
    assert began_s - 0.01 <= left["unix_s"] <= time.time()
    gateway_with_worker.remove_worker(worker, restarting=True)
    assert absence()["kind"] == "restarting"
    gateway_with_worker.join(worker, boot_id="boot-2")
    assert absence() == {"kind": "", "unix_s": 0}
