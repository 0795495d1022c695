"""/metrics: one snapshot of the worker in Prometheus' text form, vLLM's names among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from workers.protocol import (
    VLLM_ACCEPTED_PER_POSITION,
    VLLM_COUNTERS,
    LaneReport,
    Speculation,
    WorkerReport,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST

_LANE_COUNTERS = {
    "requests": "Requests that ended, cancelled and failed ones too.",
    "prompt_tokens": "Tokens of prompts.",
    "completion_tokens": "Tokens of answers.",
}
_SPEC_PREFILL_COUNTERS = {
    "prompts": "Long prompts read sparsely, by the choice of a draft model.",
    "scored_tokens": "Their tokens that the draft model scored.",
    "selected_tokens": "Those of them that were read.",
}
_PREFIX_COUNTERS = {
    "hits": "Prompts whose system prompt was read before.",
    "misses": "Prompts whose system prompt had to be read.",
    "cached_tokens": "Prompt tokens that were not read again.",
}
_LANE_GAUGES = {
    "running": "Requests that generate now.",
    "waiting": "Requests that wait for a row.",
    "slots": "Rows that may run side by side.",
}


def exposition(report: WorkerReport) -> bytes:
    """Render a report; each call has a registry of its own, so nothing is shared."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(report))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, report: WorkerReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        yield from _speculation(self._report)
        for name, text in _LANE_COUNTERS.items():
            yield self._per_lane(CounterMetricFamily, name, text)
        for name, text in _LANE_GAUGES.items():
            yield self._per_lane(GaugeMetricFamily, name, text)
        yield _bypasses(self._report)
        yield from _spec_prefill(self._report)
        yield from _grouped(self._report, "prefix", _PREFIX_COUNTERS)
        yield from _saved(self._report)
        yield self._gauge("memory_bytes", "Memory in use by MLX.")
        yield self._gauge("prefix_cache_bytes", "Memory for what is kept of system prompts.")

    def _gauge(self, name: str, text: str) -> Metric:
        gauge = GaugeMetricFamily(f"paceline_worker_{name}", text, labels=("model_name",))
        gauge.add_metric((self._report.model,), getattr(self._report, name))
        return gauge

    def _per_lane(self, family: Any, name: str, text: str) -> Metric:
        metric: Metric = family(f"paceline_worker_{name}", text, labels=("model_name", "lane"))
        for lane in self._report.lanes:
            labels = {"model_name": self._report.model, "lane": lane.name}
            suffix = "_total" if family is CounterMetricFamily else ""
            metric.add_sample(metric.name + suffix, labels, getattr(lane, name))
        return metric


def _speculation(report: WorkerReport) -> Iterator[Metric]:
    """Yield vLLM's counters, summed over all lanes because readers sum samples."""
    total = sum((lane.speculation for lane in report.lanes), Speculation())
    for field, (name, text) in VLLM_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=("model_name",))
        counter.add_metric((report.model,), getattr(total, field))
        yield counter
    name, text = VLLM_ACCEPTED_PER_POSITION
    per_position = CounterMetricFamily(name, text, labels=("model_name", "position"))
    for position, count in enumerate(total.accepted_per_position):
        per_position.add_metric((report.model, str(position)), count)
    yield per_position


def _bypasses(report: WorkerReport) -> Metric:
    metric = CounterMetricFamily(
        "paceline_worker_bypasses",
        "Requests that did not speculate, by reason.",
        labels=("model_name", "lane", "reason"),
    )
    for lane, reason, count in _bypass_counts(report.lanes):
        metric.add_metric((report.model, lane, reason), count)
    return metric


def _grouped(report: WorkerReport, group: str, counters: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the counts that a lane's report holds as a record of its own."""
    for name, text in counters.items():
        counter = CounterMetricFamily(
            f"paceline_worker_{group}_{name}", text, labels=("model_name", "lane")
        )
        for lane in report.lanes:
            counter.add_metric((report.model, lane.name), getattr(getattr(lane, group), name))
        yield counter


def _spec_prefill(report: WorkerReport) -> Iterator[Metric]:
    yield from _grouped(report, "spec_prefill", _SPEC_PREFILL_COUNTERS)
    in_full = CounterMetricFamily(
        "paceline_worker_spec_prefill_full_prefills",
        "Prompts read in full though a draft model was asked for, by reason.",
        labels=("model_name", "lane", "reason"),
    )
    for lane in report.lanes:
        for reason, count in sorted(lane.spec_prefill.full_prefills.items()):
            in_full.add_metric((report.model, lane.name, reason), count)
    yield in_full


def _saved(report: WorkerReport) -> Iterator[Metric]:
    reading = CounterMetricFamily(
        "paceline_worker_prefix_saved_seconds",
        "Time that reading known system prompts again would have taken.",
        labels=("model_name", "lane"),
    )
    drafting = GaugeMetricFamily(  # it falls where drafting costs more than it brings
        "paceline_worker_drafting_saved_seconds",
        "Time that drafting has saved so far, less what it has cost.",
        labels=("model_name", "lane"),
    )
    for lane in report.lanes:
        reading.add_metric((report.model, lane.name), lane.time_saved.prefill_ms / 1000)
        drafting.add_metric((report.model, lane.name), lane.time_saved.decode_ms / 1000)
    yield from (reading, drafting)


def _bypass_counts(lanes: tuple[LaneReport, ...]) -> Iterator[tuple[str, str, int]]:
    for lane in lanes:
        for reason, count in sorted(lane.bypass_counts.items()):
            yield lane.name, reason, count
