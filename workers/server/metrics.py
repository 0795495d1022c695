"""Metrics of a worker in Prometheus' text format; speculation under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

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

_COUNTERS = {
    "requests": "Finished requests, including cancelled and failed ones.",
    "prompt_tokens": "Prompt tokens.",
    "completion_tokens": "Generated tokens.",
    "spec_prefill.prompts": "Long prompts that were prefilled sparsely (SpecPrefill).",
    "spec_prefill.scored_tokens": "Prompt tokens that the draft model scored.",
    "spec_prefill.selected_tokens": "Scored tokens that were prefilled.",
    "prefix.hits": "Prompts with a prefix in the cache.",
    "prefix.misses": "Prompts with a cacheable prefix that was not in the cache.",
    "prefix.cached_tokens": "Prompt tokens read from the prefix cache.",
}
"""Fields of a lane's report, which are also the names of the metrics."""
_GAUGES = {
    "running": "Requests in generation.",
    "waiting": "Requests in the queue.",
    "slots": "Maximum number of rows in a batch.",
}
_COUNTERS_BY_REASON = {
    "bypass_counts": ("bypasses", "Requests without speculative decoding, by reason."),
    "spec_prefill.full_prefills": (
        "spec_prefill_full_prefills",
        "Prompts that were prefilled in full despite SpecPrefill, by reason.",
    ),
}


def exposition(report: WorkerReport) -> bytes:
    """Return the report in Prometheus' text format; every call has a registry of its own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ReportCollector(report))
    return generate_latest(registry)


class _ReportCollector(Collector):
    def __init__(self, report: WorkerReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        yield from _speculation(self._report)
        for path, text in _COUNTERS.items():
            yield self._per_lane(
                CounterMetricFamily, path.replace(".", "_"), text, attrgetter(path)
            )
        for path, text in _GAUGES.items():
            yield self._per_lane(GaugeMetricFamily, path, text, attrgetter(path))
        for path, (name, text) in _COUNTERS_BY_REASON.items():
            yield self._by_reason(name, text, attrgetter(path))
        yield self._per_lane(
            CounterMetricFamily,
            "prefix_saved_seconds",
            "Prefill time saved by the prefix cache.",
            lambda lane: lane.time_saved.prefill_ms / 1000,
        )
        yield self._per_lane(
            GaugeMetricFamily,  # falls while drafts cost more time than they save
            "drafting_saved_seconds",
            "Decode time saved by speculative decoding, less its cost.",
            lambda lane: lane.time_saved.decode_ms / 1000,
        )
        yield self._gauge("memory_bytes", "Memory in use by MLX.")
        yield self._gauge("prefix_cache_bytes", "Memory in use by the prefix cache.")

    def _gauge(self, name: str, text: str) -> Metric:
        gauge = GaugeMetricFamily(f"paceline_worker_{name}", text, labels=("model_name",))
        gauge.add_metric((self._report.model,), getattr(self._report, name))
        return gauge

    def _per_lane(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        text: str,
        value: Callable[[LaneReport], float],
    ) -> Metric:
        metric = family(f"paceline_worker_{name}", text, labels=("model_name", "lane"))
        for lane in self._report.lanes:
            metric.add_metric((self._report.model, lane.name), value(lane))
        return metric

    def _by_reason(
        self, name: str, text: str, counts: Callable[[LaneReport], Mapping[str, int]]
    ) -> Metric:
        labels = ("model_name", "lane", "reason")
        metric = CounterMetricFamily(f"paceline_worker_{name}", text, labels=labels)
        for lane in self._report.lanes:
            for reason, count in sorted(counts(lane).items()):
                metric.add_metric((self._report.model, lane.name, reason), count)
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
