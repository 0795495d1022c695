"""Metrics of a worker in Prometheus' text format; speculation under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from paceline.protocol import (
    COUNTERS_BY_SOURCE,
    VLLM_ACCEPTED_PER_POSITION,
    VLLM_COUNTERS,
    LaneReport,
    Speculation,
    WorkerReport,
)

_COUNTERS = {
    "requests": "Finished requests, including cancelled and failed ones.",
    "prompt_tokens": "Prompt tokens.",
    "completion_tokens": "Generated tokens.",
    "steps": "Steps of decoding, each of one batch with rows of the lane.",
    "steps_ahead": "Those that the worker read while the device computed another one.",
    "spec_prefill.prompts": "Long prompts that were prefilled sparsely (SpecPrefill).",
    "spec_prefill.scored_tokens": "Prompt tokens that the draft model scored.",
    "spec_prefill.selected_tokens": "Scored tokens that were prefilled.",
    "prefix.hits": "Prompts with a prefix in the cache.",
    "prefix.misses": "Prompts with a cacheable prefix that was not in the cache.",
    "prefix.cached_tokens": "Prompt tokens read from the prefix cache.",
    "prefix.too_large": "Prompts and answers that the prefix cache has no room for.",
}
"""Fields of a lane's report, which are also the names of the metrics."""
_GAUGES = {
    "running": "Requests in generation.",
    "waiting": "Requests in the queue.",
    "slots": "Maximum number of rows in a batch.",
}
_MEMORY_GAUGES = {
    "memory_bytes": "Memory in use by MLX.",
    "footprint_bytes": "Memory of the process, as the kernel counts it.",
    "footprint_limit_bytes": "Memory that the process may take now; 0 if unknown.",
    "prefix_cache_bytes": "Memory in use by the prefix cache.",
}
_COUNTERS_BY_REASON = {
    "prefix.tokens_by_kind": (
        "prefix_tokens_by_kind",
        "Prompt tokens read from the prefix cache: of system prompts, conversations, from disk, or "
        "moved from another worker.",
    ),
    "prefix.moves": (
        "prefix_moves",
        "Transfers of earlier turns from other workers, by result.",
    ),
    "bypass_counts": ("bypasses", "Requests without speculative decoding, by reason."),
    "spec_prefill.full_prefills": (
        "spec_prefill_full_prefills",
        "Prompts that were prefilled in full despite SpecPrefill, by reason.",
    ),
}

_Family = type[CounterMetricFamily | GaugeMetricFamily]
_Samples = Iterable[tuple[Any, ...]]
"""Of each sample the values of its labels, then its number."""
_SAVED: Mapping[str, tuple[_Family, str, str]] = {
    "prefix_saved_seconds": (
        CounterMetricFamily,
        "Prefill time saved by the prefix cache.",
        "prefill_ms",
    ),
    "drafting_saved_seconds": (
        GaugeMetricFamily,  # falls while drafts cost more time than they save
        "Decode time saved by speculative decoding, less its cost.",
        "decode_ms",
    ),
}


def exposition(report: WorkerReport) -> bytes:
    """Return the report in Prometheus' text format."""
    return generate_latest(_ReportCollector(report))


class _ReportCollector(Collector):
    def __init__(self, report: WorkerReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        lanes = self._report.lanes
        samples: _Samples
        yield from self._speculation()
        for family, numbers in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for path, text in numbers.items():
                samples = ((lane.name, attrgetter(path)(lane)) for lane in lanes)
                yield self._metric(family, path.replace(".", "_"), text, samples, "lane")
        for path, (name, text) in _COUNTERS_BY_REASON.items():
            samples = self._by(attrgetter(path))
            yield self._metric(CounterMetricFamily, name, text, samples, "lane", "reason")
        for name, (family, text, field) in _SAVED.items():
            samples = ((lane.name, getattr(lane.time_saved, field) / 1000) for lane in lanes)
            yield self._metric(family, name, text, samples, "lane")
        for name, text in _MEMORY_GAUGES.items():
            yield self._metric(GaugeMetricFamily, name, text, [(getattr(self._report, name),)])
        text = "Allocations of the device that have failed."
        failed = [(self._report.failed_allocations,)]
        yield self._metric(CounterMetricFamily, "failed_allocations", text, failed)

    def _speculation(self) -> Iterator[Metric]:
        """Yield vLLM's counters, summed over all lanes because readers sum samples."""
        total = sum((lane.speculation for lane in self._report.lanes), Speculation())
        for field, (name, text) in VLLM_COUNTERS.items():
            yield self._metric(CounterMetricFamily, name, text, [(getattr(total, field),)])
        name, text = VLLM_ACCEPTED_PER_POSITION
        counts = ((str(at), count) for at, count in enumerate(total.accepted_per_position))
        yield self._metric(CounterMetricFamily, name, text, counts, "position")
        for field, (name, text) in COUNTERS_BY_SOURCE.items():
            samples = self._by(attrgetter(f"speculation.{field}"))
            yield self._metric(CounterMetricFamily, name, text, samples, "lane", "source")

    def _by(self, counts_of: Callable[[LaneReport], Mapping[str, int]]) -> _Samples:
        return (
            (lane.name, reason, count)
            for lane in self._report.lanes
            for reason, count in sorted(counts_of(lane).items())
        )

    def _metric(
        self, family: _Family, name: str, text: str, samples: _Samples, *labels: str
    ) -> Metric:
        full_name = name if name.startswith(("vllm:", "paceline_")) else f"paceline_worker_{name}"
        metric = family(full_name, text, labels=("model_name", *labels))
        for *values, number in samples:
            metric.add_metric((self._report.model, *values), number)
        return metric
