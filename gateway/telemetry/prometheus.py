"""`/metrics`: what this gateway has counted in its life, written out when somebody asks.

Requests add to plain sums (`accounting.py`); labels are only put to them here, so that no request
pays for a scrape.

What workers report, for `/metrics`: a line for each worker and model, none for all of them.

Readers sum lines, so there is no line that is the sum of others. The first four have vLLM's names:
`vllm bench serve` and AIPerf read acceptance from them as they do from vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.storage.counters import CounterKey
from gateway.telemetry.accounting import Accounting
from gateway.telemetry.stats import BOUNDS_S, LaneStats, LogHistogram, cumulative
from workers.protocol import LaneReport, PrefixCounts, Speculation, TimeSaved, WorkerReport

# Each is one of the bounds that are counted by.
_SHOWN_S = tuple(bound for bound in BOUNDS_S if f"{bound:e}"[:3] in ("1.0", "2.5", "5.0"))
_MICROSECONDS_UP = tuple(bound for bound in _SHOWN_S if bound <= 1)
_MILLISECONDS_UP = tuple(bound for bound in _SHOWN_S if bound >= 0.001)
_TOKEN_S = tuple(bound for bound in _SHOWN_S if 0.0001 <= bound <= 10)


class GatewayFigures(Collector):
    """The figures of one gateway. Labels are names of pools, reasons, codes and models alone."""

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting

    def collect(self) -> Iterator[Metric]:
        """Give one family for each figure."""
        totals = self._accounting.totals()
        yield _counter(
            totals,
            "requests",
            "Finished requests, by the pool and the reason that they went there for.",
            *("pool", "reason", "status"),
        )
        yield _counter(
            totals,
            "bypass",
            "Reasons that kept requests out of the speculative lane.",
            "reason",
            name="bypasses",
        )
        yield _counter(
            totals, "errors", "Requests that ended in an error, by its code, limits too.", "code"
        )
        yield _counter(
            totals,
            "prefix",
            "Answered requests by what became of their system prompt: hit, miss, none.",
            "result",
            name="prefixes",
        )
        yield _counter(
            totals,
            "tokens",
            "Tokens of answered requests; cached ones are some of the prompt's.",
            *("model_name", "kind"),
        )
        yield CounterMetricFamily(
            "paceline_retries",
            "Attempts at a further worker, before the first byte.",
            value=totals.get(("retries",), 0),
        )
        by_pool = self._by_pool()
        for name, text, bounds_s, take in (
            (
                "time_to_first_token",
                "From the whole body read to the first content of a stream.",
                _MILLISECONDS_UP,
                attrgetter("first_token_s"),
            ),
            (
                "time_per_output_token",
                "For each token of a stream after the first one.",
                _TOKEN_S,
                attrgetter("token_s"),
            ),
            (
                "queue_wait",
                "In line for a slot, of requests that had to wait and got one.",
                _MILLISECONDS_UP,
                attrgetter("wait_s"),
            ),
            (
                "request_duration",
                "From the first byte of a request to the last of its answer, where it is whole.",
                _MILLISECONDS_UP,
                attrgetter("duration_s"),
            ),
        ):
            yield _histogram(name, text, bounds_s, by_pool, take)
        everywhere: dict[tuple[str, ...], list[LaneStats]] = {
            (): [sums for all_sums in by_pool.values() for sums in all_sums]
        }
        yield _histogram(
            "added_latency",
            "From the whole body read to the request handed to a worker, less the wait for a slot.",
            _MICROSECONDS_UP,
            everywhere,
            attrgetter("added_latency_s"),
        )

    def _by_pool(self) -> dict[tuple[str, ...], list[LaneStats]]:
        by_pool: dict[tuple[str, ...], list[LaneStats]] = {}
        for place, sums in self._accounting.lane_stats().items():
            by_pool.setdefault((place.pool,), []).append(sums)
        return by_pool


def exposition(*collectors: Collector) -> bytes:
    """Render all metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _counter(
    totals: Mapping[CounterKey, int], family: str, text: str, *labels: str, name: str = ""
) -> CounterMetricFamily:
    metric = CounterMetricFamily(f"paceline_{name or family}", text, labels=labels)
    for key, count in sorted(totals.items()):
        if key[0] == family:
            metric.add_metric(key[1:], count)
    return metric


def _histogram(
    name: str,
    text: str,
    bounds_s: tuple[float, ...],
    groups: Mapping[tuple[str, ...], Iterable[LaneStats]],
    take: Callable[[LaneStats], LogHistogram],
) -> HistogramMetricFamily:
    labels = ["pool"] if () not in groups else []
    metric = HistogramMetricFamily(f"paceline_{name}_seconds", text, labels=labels)
    for group, all_sums in sorted(groups.items()):
        counts: Counter[int] = Counter()
        spreads = [take(sums) for sums in all_sums]
        for spread in spreads:
            counts.update(dict(enumerate(spread.counts)))
        ordered = [counts[index] for index in range(len(BOUNDS_S) + 1)]
        sum_s = sum(spread.sum_s for spread in spreads)
        metric.add_metric(group, cumulative(ordered, bounds_s), sum_value=sum_s)
    return metric


_LABELS = ("model_name", "worker")


class WorkerFigures(Collector):
    """LaneStats over all boots, so that a worker that starts anew does not go back to nothing."""

    def __init__(self, reports: Iterable[WorkerReport]) -> None:
        self._lanes: dict[tuple[str, str], list[LaneReport]] = {}
        for report in reports:
            lanes = self._lanes.setdefault((report.model, report.worker_id), [])
            lanes.extend(report.lanes)

    def collect(self) -> Iterator[Metric]:
        """Give one family for each figure."""
        yield from self._drafts()
        yield from self._prefixes()

    def _drafts(self) -> Iterator[Metric]:
        drafts = CounterMetricFamily(
            "vllm:spec_decode_num_drafts", "Verifies of drafts.", labels=_LABELS
        )
        drafted = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted.", labels=_LABELS
        )
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", labels=_LABELS
        )
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=[*_LABELS, "position"],
        )
        for key, lanes in sorted(self._lanes.items()):
            drafting = [lane.speculation for lane in lanes if lane.mtp_enabled]
            if drafting:
                total = sum(drafting, Speculation())
                drafts.add_metric(key, total.steps)
                drafted.add_metric(key, total.drafted)
                accepted.add_metric(key, total.accepted)
                for position, count in enumerate(total.accepted_per_position):
                    by_position.add_metric([*key, str(position)], count)
        yield from (drafts, drafted, accepted, by_position)

    def _prefixes(self) -> Iterator[Metric]:
        hits = _counter_worker_metrics(
            "prefix_hits", "Prompts whose system prompt was read before."
        )
        misses = _counter_worker_metrics(
            "prefix_misses", "Prompts whose system prompt had to be read."
        )
        cached = _counter_worker_metrics(
            "prefix_cached_tokens", "Prompt tokens that were not read again."
        )
        reading = _counter_worker_metrics(
            "prefix_saved_seconds", "Time that reading them again would have taken."
        )
        decoding = GaugeMetricFamily(  # it falls where drafting costs more than it brings
            "paceline_worker_drafting_saved_seconds",
            "Time that drafting has saved so far, less what it has cost.",
            labels=_LABELS,
        )
        for key, lanes in sorted(self._lanes.items()):
            prefix = sum((lane.prefix for lane in lanes), PrefixCounts())
            saved = sum((lane.time_saved for lane in lanes), TimeSaved())
            hits.add_metric(key, prefix.hits)
            misses.add_metric(key, prefix.misses)
            cached.add_metric(key, prefix.cached_tokens)
            reading.add_metric(key, saved.prefill_ms / 1000)
            decoding.add_metric(key, saved.decode_ms / 1000)
        yield from (hits, misses, cached, reading, decoding)


def _counter_worker_metrics(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"paceline_worker_{name}", text, labels=_LABELS)
