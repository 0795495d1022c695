"""The dashboard and the alerts ask for figures that a gateway really gives, by their names."""

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
OF_PROMETHEUS = {"job", "instance", "le"}
WORDS_OF_PROMQL = frozenset(
    "absent and by group_left histogram_quantile ignoring increase max min or rate sum".split()
)


class Question(NamedTuple):
    """One expression, where it stands, and the labels that its texts show."""

    where: str
    expr: str
    shown: frozenset[str]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def questions() -> list[Question]:
    dashboard = json.loads((FOLDER / "paceline.json").read_text())
    panels = [
        Question(
            panel["title"],
            target["expr"].replace("$__rate_interval", "1m"),
            frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"])),
        )
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    asked = [
        Question(
            rule["alert"],
            rule["expr"],
            frozenset(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))),
        )
        for rule in alerts()
    ]
    return panels + asked


def words(expr: str) -> set[str]:
    """Name the metrics and labels of an expression."""
    bare = re.sub(r'"[^"]*"|\[\w+\]', "", expr)
    return set(re.findall(r"[a-z_][a-z0-9_:]*", bare)) - WORDS_OF_PROMQL


@pytest.fixture
def exposed_labels(
    gateway_with_traffic: RunningGateway, worker: ScriptedWorker
) -> Mapping[str, set[str]]:
    """The labels of all that a gateway tells, by name, after some of everything."""
    gateway_with_traffic.send_heartbeat(worker)  # with a lane for the others
    assert gateway_with_traffic.chat(temperature=0.5).status_code == 200
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(gateway_with_traffic.client.get("/metrics").text):
        found |= {family.name + suffix: set() for suffix in SUFFIXES.get(family.type, ())}
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_of_the_dashboard_and_the_alerts_is_in_the_exposition(
    exposed_labels: Mapping[str, set[str]],
) -> None:
    exposed_labels = {
        **exposed_labels,
        "up": {"job", "instance"},
    }  # which Prometheus adds for each target
    for question in questions():
        named = words(question.expr)
        metrics = named & exposed_labels.keys()
        labels = {label for metric in metrics for label in exposed_labels[metric]} | OF_PROMETHEUS
        assert metrics, question
        assert named - metrics <= labels, question
        assert question.shown <= labels, question


def test_the_dashboard_and_the_alerts_show_all_that_operators_ask_for() -> None:
    asked = " ".join(question.expr for question in questions())
    for needed in (
        *("vllm:spec_decode_num_accepted_tokens_total", "paceline_requests_total"),
        *("paceline_queue_wait_seconds_bucket", "paceline_time_to_first_token_seconds_bucket"),
        *("paceline_added_latency_seconds_bucket", "paceline_prefixes_total"),
        *("paceline_worker_ejections", "paceline_retries_denied_total"),
        *("paceline_time_per_output_token_seconds_bucket", "paceline_tokens_total"),
        *("paceline_bypasses_total", "paceline_errors_total", "paceline_store_degraded"),
        *("paceline_worker_drafting_saved_seconds", "paceline_worker_prefix_saved_seconds_total"),
    ):
        assert needed in asked


def test_each_alert_that_operators_ask_for_is_there_once_and_says_what_is_wrong() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert sorted(set(names)) == sorted(names)
    wanted = ("AcceptanceFell", "LaneNotPaying", "WorkerEjected", "RedisDegraded")
    assert {f"Paceline{name}" for name in wanted} <= set(names)
    assert all(rule["annotations"]["summary"].endswith(".") for rule in alerts())


def test_a_worker_that_two_gateways_tell_of_counts_once() -> None:
    for question in questions():
        for found in re.finditer(r"(?:rate\()?vllm:|paceline_worker_(?!in_flight)", question.expr):
            before = question.expr[: found.start()]
            assert re.search(r"(max|min) by \([^)]*worker[^)]*\) \($|absent\($", before), question


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_own_tool_takes_the_alerts_and_every_expression(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": q.expr} for i, q in enumerate(questions())]
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yml", panels], check=True)


GOOD_MIN, IN_ALL_MIN = 1440, 1470
DRAFTS = 'vllm:spec_decode_num_{}_total{{model_name="demo",worker="a"}}'
REQUESTS = 'paceline_requests_total{{pool="text-mtp",reason="{}",status="200"}}'


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize(
    ("alert", "series", "labels"),
    [
        (
            "PacelineAcceptanceFell",
            {
                DRAFTS.format("drafts"): "0+1200x1470",
                DRAFTS.format("draft_tokens"): "0+2400x1470",
                DRAFTS.format("accepted_tokens"): "0+1920x1440 2765760+960x30",
            },
            'worker="a"',
        ),
        (
            "PacelineLaneNotPaying",
            {
                REQUESTS.format("mtp_not_paying"): "0x1440 60+60x30",
                REQUESTS.format("eligible"): "0+30x1470",
            },
            "",
        ),
        (
            "PacelineWorkerEjected",
            {'paceline_worker_ejections{worker="a",instance="g"}': "0x1440 1x30"},
            'worker="a"',
        ),
        (
            "PacelineRedisDegraded",
            {'paceline_store_degraded{instance="g"}': "0x1440 1x30"},
            'instance="g"',
        ),
    ],
)
def test_prometheus_raises_what_operators_ask_for_and_only_then(
    tmp_path: Path, alert: str, series: Mapping[str, str], labels: str
) -> None:
    """A good day goes by in silence; half an hour of what the alert is for raises it."""
    raised = f'ALERTS{{alertname="{alert}",alertstate="firing",severity="warning",{labels}}}'
    world = {
        "interval": "1m",
        "input_series": [{"series": one, "values": told} for one, told in series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{alert}"}}',
                "eval_time": f"{at_min}m",
                "exp_samples": due,
            }
            for at_min, due in (
                (GOOD_MIN, []),
                (IN_ALL_MIN, [{"labels": raised, "value": 1}]),
            )
        ],
    }
    file = tmp_path / "test.yml"
    rules = [str(FOLDER / "alerts.yml")]
    file.write_text(
        yaml.safe_dump({"rule_files": rules, "evaluation_interval": "1m", "tests": [world]})
    )
    subprocess.run(["promtool", "test", "rules", file], check=True)
