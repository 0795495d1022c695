"""The dashboard and the alerts use metrics that a gateway exposes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker

FOLDER = Path(__file__).parents[3] / "docs" / "grafana"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
PROMETHEUS_LABELS = {"job", "instance", "le"}
PROMQL_KEYWORDS = frozenset(
    "absent and by group_left histogram_quantile ignoring increase max min or rate sum".split()
)


class Query(NamedTuple):
    """One expression, the place where it is used, and the labels that its texts show."""

    source: str
    expr: str
    legend_labels: frozenset[str]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def queries() -> list[Query]:
    dashboard = json.loads((FOLDER / "paceline.json").read_text())
    used = [
        (panel["title"], target["expr"], re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    for rule in alerts():
        labels = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
        used.append((rule["alert"], rule["expr"], labels))
    return [
        Query(source, expr.replace("$__rate_interval", "1m"), frozenset(labels))
        for source, expr, labels in used
    ]


def identifiers(expr: str) -> set[str]:
    """Return the metrics and labels of an expression."""
    bare = re.sub(r'"[^"]*"|\[\w+\]', "", expr)
    return set(re.findall(r"[a-z_][a-z0-9_:]*", bare)) - PROMQL_KEYWORDS


@pytest.fixture
def exposed_labels(
    gateway_with_traffic: RunningGateway, worker: ScriptedWorker
) -> Mapping[str, set[str]]:
    """Return the labels of all exposed metrics, by name, after traffic of every kind."""
    gateway_with_traffic.send_heartbeat(worker)  # with a lane for sampled requests
    assert gateway_with_traffic.chat(temperature=0.5).status_code == 200
    labels_by_name: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(gateway_with_traffic.client.get("/metrics").text):
        labels_by_name |= {family.name + suffix: set() for suffix in SUFFIXES.get(family.type, ())}
        for sample in family.samples:
            labels_by_name.setdefault(sample.name, set()).update(sample.labels)
    return labels_by_name


def test_every_metric_and_label_of_dashboard_and_alerts_is_exposed(
    exposed_labels: Mapping[str, set[str]],
) -> None:
    # Prometheus adds the metric `up` for each target.
    exposed_labels = {**exposed_labels, "up": {"job", "instance"}}
    for query in queries():
        used = identifiers(query.expr)
        metrics = used & exposed_labels.keys()
        labels = PROMETHEUS_LABELS.union(*(exposed_labels[metric] for metric in metrics))
        assert metrics, query
        assert used - metrics <= labels, query
        assert query.legend_labels <= labels, query


def test_dashboard_and_alerts_show_all_required_metrics() -> None:
    expressions = " ".join(query.expr for query in queries())
    for required in (
        *("vllm:spec_decode_num_accepted_tokens_total", "paceline_requests_total"),
        *("paceline_queue_wait_seconds_bucket", "paceline_time_to_first_token_seconds_bucket"),
        *("paceline_added_latency_seconds_bucket", "paceline_prefixes_total"),
        *("paceline_worker_ejections", "paceline_retries_delayed_total"),
        *("paceline_time_per_output_token_seconds_bucket", "paceline_tokens_total"),
        *("paceline_bypasses_total", "paceline_errors_total", "paceline_store_degraded"),
        *("paceline_worker_drafting_saved_seconds", "paceline_worker_prefix_saved_seconds_total"),
    ):
        assert required in expressions


def test_each_required_alert_is_defined_once_with_a_summary() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert sorted(set(names)) == sorted(names)
    required = ("AcceptanceFell", "LaneNotPaying", "WorkerEjected", "RedisDegraded")
    assert {f"Paceline{name}" for name in required} <= set(names)
    assert all(rule["annotations"]["summary"].endswith(".") for rule in alerts())


def test_worker_metrics_are_aggregated_over_gateways() -> None:
    for query in queries():
        for match in re.finditer(r"(?:rate\()?vllm:|paceline_worker_(?!in_flight)", query.expr):
            before = query.expr[: match.start()]
            assert re.search(r"(max|min) by \([^)]*worker[^)]*\) \($|absent\($", before), query


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_alerts_and_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": q.expr} for i, q in enumerate(queries())]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yml", panels], check=True)


HEALTHY_MIN, TOTAL_MIN = 1440, 1470
DRAFTS = 'vllm:spec_decode_num_{}_total{{model_name="demo",worker="a"}}'
REQUESTS = 'paceline_requests_total{{pool="text-mtp",reason="{}",status="200"}}'


CONDITIONS = {
    "PacelineAcceptanceFell": (
        {
            DRAFTS.format("drafts"): "0+1200x1470",
            DRAFTS.format("draft_tokens"): "0+2400x1470",
            DRAFTS.format("accepted_tokens"): "0+1920x1440 2765760+960x30",
        },
        'worker="a"',
    ),
    "PacelineLaneNotPaying": (
        {
            REQUESTS.format("mtp_not_paying"): "0x1440 60+60x30",
            REQUESTS.format("eligible"): "0+30x1470",
        },
        "",
    ),
    "PacelineWorkerEjected": (
        {'paceline_worker_ejections{worker="a",instance="g"}': "0x1440 1x30"},
        'worker="a"',
    ),
    "PacelineRedisDegraded": (
        {'paceline_store_degraded{instance="g"}': "0x1440 1x30"},
        'instance="g"',
    ),
}
"""By alert: series of a healthy day and half an hour of its condition, and its labels."""


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_each_alert_fires_after_its_condition_and_not_before(tmp_path: Path) -> None:
    """A healthy day fires no alert; half an hour of the alert's condition fires it."""
    series: dict[str, str] = {}
    checks = []
    for alert, (values_by_series, labels) in CONDITIONS.items():
        series |= values_by_series
        firing = f'ALERTS{{alertname="{alert}",alertstate="firing",severity="warning",{labels}}}'
        checks += [
            {
                "expr": f'ALERTS{{alertname="{alert}"}}',
                "eval_time": f"{at}m",
                "exp_samples": expected,
            }
            for at, expected in ((HEALTHY_MIN, []), (TOTAL_MIN, [{"labels": firing, "value": 1}]))
        ]
    scenario = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": checks,
    }
    file = tmp_path / "test.yml"
    rules = [str(FOLDER / "alerts.yml")]
    file.write_text(
        yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": [scenario]})
    )
    subprocess.run(["promtool", "test", "rules", file], check=True)
