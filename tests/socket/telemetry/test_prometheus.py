"""`/metrics`: valid for promtool, bounded in its labels, and with all that Grafana shows."""

import itertools
import json
import random
import re
import shutil
import string
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline.request.profile import Bypass
from tests.support.gateway_fixtures import cause_traffic, gateway_of_module
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import Script, ScriptedWorker

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory, module_worker: ScriptedWorker) -> str:
    """Return the metrics of a gateway after traffic of every kind."""
    with gateway_of_module(tmp_path_factory.mktemp("traffic")) as gateway:
        cause_traffic(gateway, module_worker)
        return gateway.client.get("/metrics").text


def test_the_metrics_page_lists_exactly_the_exposed_metrics_and_each_help_is_a_sentence(
    exposition: str,
) -> None:
    exposed = {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in families(exposition)
    }
    assert len(exposed) == len(families(exposition)), "each family occurs once"
    assert all(re.fullmatch(r"\S.*\.", one.documentation) for one in families(exposition))
    rows = re.findall(r"^\| `((?:paceline_|vllm:)\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == exposed


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_reports_only_the_names_that_vllm_defines(exposition: str) -> None:
    command = ["promtool", "check", "metrics"]
    result = subprocess.run(command, input=exposition, capture_output=True, text=True, check=False)
    problems = [line.split(" ", 1) for line in (result.stdout + result.stderr).splitlines()]
    assert problems
    for name, problem in problems:
        assert name.startswith("vllm:"), name
        assert problem == "metric names should not contain ':'"


def test_all_required_metrics_are_exposed_with_their_labels(exposition: str) -> None:
    exposed = {family.name: family for family in families(exposition)}
    worker = {"model_name", "worker"}
    for kind, labels, names in (
        ("counter", set(), "bypasses prefix_not_reused retries"),
        ("counter", set(), "retries_delayed"),
        ("gauge", set(), "store_degraded"),
        ("counter", {"pool", "reason", "status"}, "requests"),
        ("counter", {"code"}, "errors"),
        ("counter", {"result"}, "prefixes"),
        ("counter", {"model_name", "kind"}, "tokens"),
        ("histogram", {"pool", "le"}, "time_to_first_token_seconds time_per_output_token_seconds"),
        ("histogram", {"pool", "le"}, "queue_wait_seconds request_duration_seconds"),
        ("histogram", {"le"}, "added_latency_seconds"),
        ("gauge", {"worker"}, "worker_available worker_ejections"),
        ("counter", worker, "worker_prefix_hits"),
        ("gauge", worker, "worker_drafting_saved_seconds"),
        ("counter", {*worker, "source"}, "worker_drafted_tokens worker_accepted_tokens"),
    ):
        for name in names.split():
            family = exposed[f"paceline_{name}"]
            assert family.type == kind, name
            assert {*itertools.chain(*(one.labels for one in family.samples))} == labels, name
    drafts = exposed["vllm:spec_decode_num_drafts"]
    assert (drafts.type, {*drafts.samples[0].labels}) == ("counter", worker)


@pytest.mark.parametrize(
    ("name", "lowest_s", "highest_s"),
    [
        ("added_latency", 0.00001, 1),
        ("time_per_output_token", 0.0001, 10),
        ("time_to_first_token", 0.001, 500),
        ("queue_wait", 0.001, 500),
        ("request_duration", 0.001, 500),
    ],
)
def test_buckets_cover_the_expected_range_and_are_cumulative(
    exposition: str, name: str, lowest_s: float, highest_s: float
) -> None:
    exposed = {family.name: family for family in families(exposition)}
    family = exposed[f"paceline_{name}_seconds"]
    buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
    bounds_s = [float(sample.labels["le"]) for sample in buckets]
    counts = [sample.value for sample in buckets]
    (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
    (sum_s,) = [sample.value for sample in family.samples if sample.name.endswith("_sum")]
    assert (bounds_s[0], bounds_s[-2]) == (lowest_s, highest_s)
    assert bounds_s == sorted(bounds_s)
    assert bounds_s[-1] == float("inf")
    assert counts == sorted(counts)
    assert counts[-1] == count > 0
    assert sum_s > 0


def test_neither_clients_nor_workers_can_create_label_values(gateway, worker) -> None:
    assert gateway.chat(model="one").status_code == 503
    assert gateway.status()["models"] == {}
    gateway.join(worker)
    rng = random.Random(7)
    worker.script = Script(
        rotation=tuple(
            Script(status=400, body=b'{"error": {"message": "no", "code": "%d"}}' % number)
            for number in range(30)
        )
    )

    def word() -> str:
        return "".join(rng.choices(string.ascii_letters, k=8))

    for _ in range(30):
        message = {"role": "user", "content": word()}
        named = {"user-agent": word(), "x-request-id": word()}
        gateway.chat(model=word(), messages=[message], headers=named)
        gateway.chat(headers={"x-paceline-priority": word()})
        gateway.chat(user=word())
        gateway.client.get(f"/{word()}")
    exposed = families(gateway.client.get("/metrics").text)
    series = Counter(family.name for family in exposed for _ in family.samples)
    labels = {
        value for family in exposed for sample in family.samples for value in sample.labels.values()
    }
    assert max(series.values()) < 40, series
    reasons = {reason.value for reason in Bypass} | {"eligible", "policy", "spilled", "none"}
    (errors,) = [family for family in exposed if family.name == "paceline_errors"]
    codes = {"invalid_value", "model_not_found", "no_worker", "refused_by_worker"}
    assert {sample.labels["code"] for sample in errors.samples} == codes
    (requests,) = [family for family in exposed if family.name == "paceline_requests"]
    assert {sample.labels["reason"] for sample in requests.samples} <= reasons
    random_word = re.compile(r"[A-Za-z]{8}")
    assert {label for label in labels if random_word.fullmatch(label)} <= {"eligible", "text-mtp"}
    assert gateway.status()["errors"].keys() == codes


FOLDER = Path(__file__).parents[3] / "docs" / "grafana"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
PROMETHEUS_LABELS = {"job", "instance", "le"}
PROMQL_KEYWORDS = frozenset(
    "absent and by group_left histogram_quantile ignoring increase max min or rate sum "
    "unless".split()
)


class Query(NamedTuple):
    """One expression, the place where it is used, and the labels that its texts show."""

    source: str
    expr: str
    legend_labels: frozenset[str]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return group["rules"]


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


def test_every_metric_and_label_of_dashboard_and_alerts_is_exposed(
    gateway_with_traffic: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway_with_traffic.join(worker)  # with a lane for sampled requests
    assert gateway_with_traffic.chat(temperature=0.5).status_code == 200
    # Prometheus adds the metric `up` for each target.
    exposed_labels: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in families(gateway_with_traffic.client.get("/metrics").text):
        exposed_labels |= {family.name + suffix: set() for suffix in SUFFIXES.get(family.type, ())}
        for sample in family.samples:
            exposed_labels.setdefault(sample.name, set()).update(sample.labels)
    for query in queries():
        used = identifiers(query.expr)
        metrics = used & exposed_labels.keys()
        labels = PROMETHEUS_LABELS.union(*(exposed_labels[metric] for metric in metrics))
        assert metrics, query
        assert used - metrics <= labels, query
        assert query.legend_labels <= labels, query


def test_dashboard_and_alerts_show_all_required_metrics_those_of_workers_over_all_gateways() -> (
    None
):
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
    for query in queries():
        for match in re.finditer(r"(?:rate\()?vllm:|paceline_worker_(?!in_flight)", query.expr):
            before = query.expr[: match.start()]
            assert re.search(r"(max|min) by \([^)]*worker[^)]*\) \($|absent\($", before), query
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    assert CONDITIONS.keys() <= {*names}
    assert all(rule["annotations"]["summary"].endswith(".") for rule in alerts())


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
    "PacelineWorkerUnavailable": (
        {
            'paceline_worker_available{worker="lost",instance="g"}': "1x1440 0x30",
            'paceline_worker_available{worker="held",instance="g"}': "1x1440 0x30",
            'paceline_worker_cordoned{worker="held",instance="g"}': "1x1470",
        },
        'worker="lost"',
    ),
    "PacelineStateUnwritable": (
        {'paceline_state_unwritable{instance="g"}': "0x1440 1x30"},
        'instance="g"',
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
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in alerts()}
    for alert, (values_by_series, labels) in CONDITIONS.items():
        series |= values_by_series
        severity = severities[alert]
        firing = f'ALERTS{{alertname="{alert}",alertstate="firing",severity="{severity}",{labels}}}'
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
