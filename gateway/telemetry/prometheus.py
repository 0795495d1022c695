"""`/metrics`: counters and histograms of this gateway, and counts that workers report.

Requests only add to plain counters (`accounting.py`); labels are attached when Prometheus scrapes.
Worker metrics have one sample for each worker and model and no total, because readers sum samples.
The speculative decoding metrics have vLLM's names, so `vllm bench serve` and AIPerf read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.state.counters import CounterKey
from gateway.telemetry import engine_counts
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.stats import BOUNDS_S, LaneKey, LaneStats, LogHistogram, cumulative
from paceline import protocol

_SHOWN_S = tuple(bound for bound in BOUNDS_S if f"{bound:e}"[:3] in ("1.0", "2.5", "5.0"))
_MICROSECONDS_UP = tuple(bound for bound in _SHOWN_S if bound <= 1)
_MILLISECONDS_UP = tuple(bound for bound in _SHOWN_S if bound >= 0.001)
_TOKEN_S = tuple(bound for bound in _SHOWN_S if 0.0001 <= bound <= 10)

_COUNTERS = (  # family of counts, name, help, labels
    ("requests", "requests", "Finished requests.", ("pool", "reason", "status")),
    (
        "bypass",
        "bypasses",
        "Requests kept out of the speculative lane; a request may have several reasons.",
        ("reason",),
    ),
    ("errors", "errors", "Requests that ended with an error, by error code.", ("code",)),
    (
        "prefix",
        "prefixes",
        "Answered requests by the prefix cache result of their prompt (hit, miss, none, unknown).",
        ("result",),
    ),
    (
        "not_reused",
        "prefix_not_reused",
        "Requests whose worker read earlier turns again, by why.",
        ("reason",),
    ),
    (
        "speculation_and_reuse",
        "speculation_and_reuse",
        "Requests that could draft and reuse earlier tokens, by which of the two they did.",
        ("result",),
    ),
    (
        "tokens",
        "tokens",
        "Tokens of answered requests (prompt, completion); cached tokens are part of the prompt.",
        ("model_name", "kind"),
    ),
    ("retries", "retries", "Attempts after the first one of a request.", ()),
    (
        "failovers",
        "failovers",
        "How often requests went on at another worker after one that had begun them.",
        (),
    ),
)


_HISTOGRAMS = (  # name, help, bounds, field of `LaneStats`, labels
    (
        "time_to_first_token",
        "Time from the complete request body to the first content of a stream.",
        _MILLISECONDS_UP,
        "first_token_s",
        ("pool",),
    ),
    (
        "time_per_output_token",
        "Time per token of a stream after the first one.",
        _TOKEN_S,
        "token_s",
        ("pool",),
    ),
    (
        "queue_wait",
        "Time in the queue, of requests that waited for a slot and got one.",
        _MILLISECONDS_UP,
        "wait_s",
        ("pool",),
    ),
    (
        "request_duration",
        "Time from the first byte of a request to the last byte of its complete response.",
        _MILLISECONDS_UP,
        "duration_s",
        ("pool",),
    ),
    (
        "added_latency",
        "Time from the complete request body to its dispatch, less the time in the queue.",
        _MICROSECONDS_UP,
        "added_latency_s",
        (),
    ),
)
_WORKER_LABELS = ("model_name", "worker")


def exposition(*collectors: Collector) -> bytes:
    """Render all metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


class GatewayMetrics(Collector):
    """Metrics of one gateway; labels hold names of pools, reasons, codes and models only."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        totals = self._accounting.totals()
        for family, name, text, labels in _COUNTERS:
            yield _counter(totals, family, name, text, labels)
        lanes = self._accounting.lane_stats()
        for name, text, bounds_s, field, labels in _HISTOGRAMS:
            yield _histogram(lanes, name, text, bounds_s, field, labels=labels)


class WorkerMetrics(Collector):
    """Sums over all boots of each worker, so that counters do not fall when a worker restarts.

    `counts` hold what gateways count of engines that send no reports. What such an engine does not
    tell has no sample: 0 would be wrong.
    """

    def __init__(
        self,
        reports: Iterable[protocol.WorkerReport],
        counts: Mapping[CounterKey, int] = MappingProxyType({}),
    ) -> None:
        self._lanes: dict[tuple[str, str], list[protocol.LaneReport]] = {}
        self._untold = engine_counts.untold_by_place(counts)
        self._engines = {place.worker_id for place in self._untold}
        for report in (*reports, *engine_counts.engine_reports(counts)):
            lanes = self._lanes.setdefault((report.model, report.worker_id), [])
            lanes.extend(report.lanes)

    def collect(self) -> Iterator[Metric]:
        """Yield one family for each metric."""
        yield from self._work()
        yield from self._speculation()
        yield from self._prefix_and_savings()

    def _work(self) -> Iterator[Metric]:
        requests = _worker_counter("requests", "Requests that have ended.")
        tokens = CounterMetricFamily(
            "paceline_worker_tokens",
            "Tokens of requests that have ended (prompt, completion).",
            labels=(*_WORKER_LABELS, "kind"),
        )
        for key, lanes in sorted(self._lanes.items()):
            requests.add_metric(key, sum(lane.requests for lane in lanes))
            tokens.add_metric((*key, "prompt"), sum(lane.prompt_tokens for lane in lanes))
            tokens.add_metric((*key, "completion"), sum(lane.completion_tokens for lane in lanes))
        unreported = CounterMetricFamily(
            "paceline_worker_unreported_answers",
            "Answers of engines that did not tell their usage, cached_tokens or drafts.",
            labels=(*_WORKER_LABELS, "number"),
        )
        untold: Counter[tuple[str, ...]] = Counter()
        for place, numbers in self._untold.items():
            for number, answers in numbers.items():
                untold[place.model, place.worker_id, number] += answers
        for labels, answers in sorted(untold.items()):
            unreported.add_metric(labels, answers)
        yield from (requests, tokens, unreported)

    def _speculation(self) -> Iterator[Metric]:
        counters = {
            field: CounterMetricFamily(name, text, labels=_WORKER_LABELS)
            for field, (name, text) in protocol.VLLM_COUNTERS.items()
        }
        name, text = protocol.VLLM_ACCEPTED_PER_POSITION
        per_position = CounterMetricFamily(name, text, labels=(*_WORKER_LABELS, "position"))
        by_source = {
            field: CounterMetricFamily(name, text, labels=(*_WORKER_LABELS, "source"))
            for field, (name, text) in protocol.COUNTERS_BY_SOURCE.items()
        }
        for key, lanes in sorted(self._lanes.items()):
            drafting = [lane.speculation for lane in lanes if lane.mtp_enabled]
            if not drafting:
                continue
            total = sum(drafting, protocol.Speculation())
            for field, counter in counters.items():
                counter.add_metric(key, getattr(total, field))
            for position, count in enumerate(total.accepted_per_position):
                per_position.add_metric((*key, str(position)), count)
            for field, counter in by_source.items():
                for source, count in sorted(getattr(total, field).items()):
                    counter.add_metric((*key, source), count)
        yield from (*counters.values(), per_position, *by_source.values())

    def _prefix_and_savings(self) -> Iterator[Metric]:
        hits = _worker_counter("prefix_hits", "Prompts with a prefix found in the cache.")
        misses = _worker_counter("prefix_misses", "Prompts with a prefix not found in the cache.")
        cached = _worker_counter("prefix_cached_tokens", "Prompt tokens found in the cache.")
        reused = CounterMetricFamily(
            "paceline_worker_prefix_reused_tokens",
            "Prompt tokens found in the cache, by what they are.",
            labels=(*_WORKER_LABELS, "kind"),
        )
        prefill = _worker_counter(
            "prefix_saved_seconds", "Estimated prefill time that the prefix cache saved."
        )
        decode = GaugeMetricFamily(  # falls if drafting costs more than it saves
            "paceline_worker_drafting_saved_seconds",
            "Estimated decode time that drafting saved, less its cost.",
            labels=_WORKER_LABELS,
        )
        for key, lanes in sorted(self._lanes.items()):
            prefix = sum((lane.prefix for lane in lanes), protocol.PrefixCounts())
            if key[1] in self._engines and not prefix.hits + prefix.misses:
                continue
            time_saved = sum((lane.time_saved for lane in lanes), protocol.TimeSaved())
            hits.add_metric(key, prefix.hits)
            misses.add_metric(key, prefix.misses)
            cached.add_metric(key, prefix.cached_tokens)
            for kind, tokens in sorted(prefix.tokens_by_kind.items()):
                reused.add_metric((*key, kind), tokens)
            prefill.add_metric(key, time_saved.prefill_ms / 1000)
            decode.add_metric(key, time_saved.decode_ms / 1000)
        yield from (hits, misses, cached, reused, prefill, decode)


def _counter(
    totals: Mapping[CounterKey, int], family: str, name: str, text: str, labels: tuple[str, ...]
) -> CounterMetricFamily:
    metric = CounterMetricFamily(f"paceline_{name}", text, labels=labels)
    if not labels:
        metric.add_metric((), totals.get((family,), 0))
        return metric
    for key, count in sorted(totals.items()):
        if key[0] == family:
            metric.add_metric(key[1:], count)
    return metric


def _histogram(
    lanes: Mapping[LaneKey, LaneStats],
    name: str,
    text: str,
    bounds_s: tuple[float, ...],
    field: str,
    *,
    labels: tuple[str, ...],
) -> HistogramMetricFamily:
    """Return a family with the sum over the lanes that have the same labels."""
    groups: dict[tuple[str, ...], list[LogHistogram]] = {} if labels else {(): []}
    for key, lane in lanes.items():
        values = tuple(getattr(key, label) for label in labels)
        groups.setdefault(values, []).append(getattr(lane, field))
    metric = HistogramMetricFamily(f"paceline_{name}_seconds", text, labels=labels)
    for values, parts in sorted(groups.items()):
        counts = [sum(bucket) for bucket in zip(*(part.counts for part in parts), strict=True)]
        buckets = cumulative(counts, bounds_s)
        metric.add_metric(values, buckets, sum_value=sum(part.sum_s for part in parts))
    return metric


def _worker_counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"paceline_worker_{name}", text, labels=_WORKER_LABELS)
