"""`/metrics`: parsed by Prometheus' own parser, checked by promtool's rules, bounded in its
labels."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import string
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from policies.request.profile import Bypass
from tests.support.gateway_fixtures import cause_traffic, gateway_of_module
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import Script, ScriptedWorker

# From promlint, which `promtool check metrics` runs.
ABBREVIATED = frozenset("s ms us ns sec b kb mb gb tb pb m h d".split())
NOT_BASE = re.compile(
    r"(milli|micro|nano|kilo|mega|giga|kibi|mebi|gibi)\w+|minutes?|hours?|days?|weeks?|bits?|fahrenheit"
)
PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"
KINDS = ("counter", "gauge", "histogram", "summary")
VLLM = "vllm:"  # vLLM defines these names


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


@pytest.fixture(scope="module")
def exposition(tmp_path_factory: pytest.TempPathFactory, module_worker: ScriptedWorker) -> str:
    """Return the metrics of a gateway after traffic of every kind."""
    with gateway_of_module(tmp_path_factory.mktemp("traffic")) as gateway:
        cause_traffic(gateway, module_worker)
        return gateway.client.get("/metrics").text


def test_the_metrics_page_lists_exactly_the_exposed_metrics(exposition: str) -> None:
    exposed = {
        family.name + "_total" * (family.type == "counter"): family.type
        for family in families(exposition)
    }
    rows = re.findall(r"^\| `((?:paceline_|vllm:)\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == exposed


def problems(family: Metric) -> list[str]:
    """Return the problems that promtool would report for one parsed family."""
    name = family.name
    names = {sample.name for sample in family.samples} or {name}
    labels = {label for sample in family.samples for label in sample.labels}
    name_parts = set(name.split("_"))
    totals = {sample_name.endswith("_total") for sample_name in names}
    of_histogram = any(one.endswith(("_bucket", "_count", "_sum")) for one in names)
    counter, histogram = family.type == "counter", family.type == "histogram"
    other_unit = bool(name_parts & ABBREVIATED) or any(map(NOT_BASE.fullmatch, name_parts))
    checks = (
        ("no help text", not family.documentation),
        ("the help is no sentence", not re.fullmatch(r"\S.*\.", family.documentation)),
        ("no type", family.type not in KINDS),
        ("a counter without _total", counter and family.samples and False in totals),
        ("_total on another type than a counter", not counter and True in totals),
        ("a suffix of histograms", not histogram and of_histogram),
        ("a label of histograms", not histogram and "le" in labels),
        ("capital letters", name != name.lower()),
        ("a reserved character", ":" in name and not name.startswith(VLLM)),
        ("no base unit", other_unit),
        ("its type in its name", bool(name_parts & set(KINDS))),
        ("a bad label", not all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in labels)),
    )
    return [problem for problem, failed in checks if failed]


def test_the_exposition_has_no_lint_problems(exposition: str) -> None:
    exposed = families(exposition)
    problems_by_name = {family.name: problems(family) for family in exposed}
    assert {name: found for name, found in problems_by_name.items() if found} == {}
    assert len(exposed) == len(problems_by_name), "each family occurs once"


def test_the_lint_finds_known_problems() -> None:
    text = "# TYPE paceline_wait_ms gauge\npaceline_wait_ms 1\n# TYPE a_total gauge\na_total 1\n"
    wait, total_suffixes = families(text)
    assert problems(wait) == ["no help text", "the help is no sentence", "no base unit"]
    assert "_total on another type than a counter" in problems(total_suffixes)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_reports_no_problem(exposition: str) -> None:
    text = exposition
    own_metrics = "\n".join(line for line in text.splitlines() if VLLM not in line) + "\n"
    result = subprocess.run(
        ["promtool", "check", "metrics"],
        input=own_metrics,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_all_required_metrics_are_exposed_with_their_labels(exposition: str) -> None:
    exposed = {family.name: family for family in families(exposition)}
    for name, kind, labels in (
        ("paceline_requests", "counter", {"pool", "reason", "status"}),
        ("paceline_bypasses", "counter", set()),
        ("paceline_errors", "counter", {"code"}),
        ("paceline_prefixes", "counter", {"result"}),
        ("paceline_prefix_not_reused", "counter", set()),
        ("paceline_speculation_and_reuse", "counter", set()),
        ("paceline_speculation_or_reuse_lost", "gauge", set()),
        ("paceline_tokens", "counter", {"model_name", "kind"}),
        ("paceline_retries", "counter", set()),
        ("paceline_retries_delayed", "counter", set()),
        ("paceline_time_to_first_token_seconds", "histogram", {"pool", "le"}),
        ("paceline_time_per_output_token_seconds", "histogram", {"pool", "le"}),
        ("paceline_queue_wait_seconds", "histogram", {"pool", "le"}),
        ("paceline_request_duration_seconds", "histogram", {"pool", "le"}),
        ("paceline_added_latency_seconds", "histogram", {"le"}),
        ("paceline_worker_available", "gauge", {"worker"}),
        ("paceline_worker_ejections", "gauge", {"worker"}),
        ("paceline_worker_prefix_hits", "counter", {"model_name", "worker"}),
        ("paceline_worker_drafting_saved_seconds", "gauge", {"model_name", "worker"}),
        ("paceline_worker_drafted_tokens", "counter", {"model_name", "worker", "source"}),
        ("paceline_worker_accepted_tokens", "counter", {"model_name", "worker", "source"}),
        ("paceline_store_degraded", "gauge", set()),
        ("vllm:spec_decode_num_drafts", "counter", {"model_name", "worker"}),
    ):
        assert exposed[name].type == kind, name
        assert {*itertools.chain(*(one.labels for one in exposed[name].samples))} == labels, name


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


def test_neither_clients_nor_workers_can_create_label_values(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
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
        gateway_with_worker.chat(model=word(), messages=[message], headers=named)
        gateway_with_worker.chat(headers={"x-paceline-priority": word()})
        gateway_with_worker.chat(user=word())
        gateway_with_worker.client.get(f"/{word()}")
    exposed = families(gateway_with_worker.client.get("/metrics").text)
    series = Counter(family.name for family in exposed for _ in family.samples)
    labels = {
        value for family in exposed for sample in family.samples for value in sample.labels.values()
    }
    assert max(series.values()) < 40, series
    reasons = {reason.value for reason in Bypass} | {"eligible", "policy", "spilled", "none"}
    (errors,) = [family for family in exposed if family.name == "paceline_errors"]
    codes = {"invalid_value", "model_not_found", "refused_by_worker"}
    assert {sample.labels["code"] for sample in errors.samples} == codes
    (requests,) = [family for family in exposed if family.name == "paceline_requests"]
    assert {sample.labels["reason"] for sample in requests.samples} <= reasons
    random_word = re.compile(r"[A-Za-z]{8}")
    assert {label for label in labels if random_word.fullmatch(label)} <= {"eligible", "text-mtp"}
    assert gateway_with_worker.status()["errors"].keys() == codes


def test_without_workers_model_names_of_requests_are_not_counted(gateway: RunningGateway) -> None:
    for name in ("one", "two"):
        assert gateway.chat(model=name).status_code == 503
    assert gateway.status()["models"] == {}
    text = gateway.client.get("/metrics").text
    assert "one" not in re.findall(r'model_name="(\w+)"', text)
