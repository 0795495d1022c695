"""The dashboard and the alerts ask for figures that a gateway really gives, by their names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.fake_worker import FakeWorker, lane_report, speculation
from tests.gateway.serving import Gateway, eventually

FOLDER = Path(__file__).parents[2] / "docs" / "grafana"
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


def questions() -> list[Question]:
    dashboard = json.loads((FOLDER / "paceline.json").read_text())
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = [
        Question(
            panel["title"],
            target["expr"].replace("$__rate_interval", "1m"),
            frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"])),
        )
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    alerts = [
        Question(
            rule["alert"],
            rule["expr"],
            frozenset(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))),
        )
        for rule in rules
    ]
    return panels + alerts


def words(expr: str) -> set[str]:
    """Name the metrics and labels of an expression."""
    bare = re.sub(r'"[^"]*"|\[\w+\]', "", expr)
    return set(re.findall(r"[a-z_][a-z0-9_:]*", bare)) - WORDS_OF_PROMQL


@pytest.fixture
def told(gateway: Gateway, worker: FakeWorker) -> Mapping[str, set[str]]:
    """The labels of all that a gateway tells, by name, after some of everything."""
    lane = lane_report("text-mtp", slots=1, speculation=speculation(steps=4, one=1, two=1))
    worker.reported = worker.report(lanes=[lane.model_dump()])
    gateway.join(worker, lanes=[lane.model_dump()])
    worker.script.hang = True
    with ThreadPoolExecutor(2) as aside:
        asked = [aside.submit(gateway.chat, temperature=0, stream=True) for _ in range(2)]
        eventually(lambda: bool(gateway.status()["pools"]["text-mtp"]["waiting"]))
        worker.go_on.set()
        assert [answer.result().status_code for answer in asked] == [200, 200]
    gateway.join(worker)  # with a lane for the others
    assert [gateway.chat(temperature=heat).status_code for heat in (0.5, 9)] == [200, 400]
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(gateway.client.get("/metrics").text):
        found |= {family.name + suffix: set() for suffix in SUFFIXES.get(family.type, ())}
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_of_the_dashboard_and_the_alerts_is_in_the_exposition(
    told: Mapping[str, set[str]],
) -> None:
    told = {**told, "up": {"job", "instance"}}  # which Prometheus adds for each target
    for question in questions():
        named = words(question.expr)
        metrics = named & told.keys()
        labels = {label for metric in metrics for label in told[metric]} | OF_PROMETHEUS
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


def test_no_alert_stands_twice() -> None:
    alerts = re.findall(r"- alert: (\w+)", (FOLDER / "alerts.yml").read_text())
    assert len(alerts) == len(set(alerts)) > 5


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
