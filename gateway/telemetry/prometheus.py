"""`/metrics`: counters and histograms of this gateway, and counts that workers report.

Requests only add to plain counters (`accounting.py`); labels are attached when Prometheus scrapes.
Worker metrics have one sample for each worker and model and no total, because readers sum samples.
The speculative decoding metrics have vLLM's names, so `vllm bench serve` and AIPerf read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace

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
_WORKER_LABELS = ("model_name", "worker")


def _rows(table: str) -> list[tuple[str, ...]]:
    """Return the words of each first line of two, and the help that the second line has."""
    lines = table.strip().splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(*first.split(), second.strip()) for first, second in pairs]


_COUNTERS = _rows(  # family of counts, name, labels
    """
    requests requests pool,reason,status
        Finished requests.
    bypass bypasses reason
        Requests without drafts of the lane text-mtp; one may have several reasons.
    errors errors code
        Requests that ended with an error, by error code.
    prefix prefixes result
        Answered requests by the prefix cache result of their prompt (hit, miss, none, unknown).
    not_reused prefix_not_reused reason
        Requests whose worker read earlier turns again, by cause.
    tokens tokens model_name,kind
        Tokens of answered requests (prompt, completion); cached tokens are part of the prompt.
    retries retries -
        Attempts after the first one of a request.
    failovers failovers -
        Continuations of requests at another worker.
    """
)
_HISTOGRAMS = _rows(  # field of `LaneStats`, name, least and most seconds of a bound, labels
    """
    first_token_s time_to_first_token 1e-3 inf pool
        Time from the complete request body to the first content of a stream.
    token_s time_per_output_token 1e-4 10 pool
        Time per token after the first one: at the worker, or of a stream as it comes.
    wait_s queue_wait 1e-3 inf pool
        Time in the queue for requests that waited for a slot and got one.
    duration_s request_duration 1e-3 inf pool
        Time from the first byte of a request to the last byte of its complete response.
    added_latency_s added_latency 0 1 -
        Time from the complete request body to its dispatch, less the time in the queue.
    """
)
_ACCEPTED_AT, _ACCEPTED_AT_TEXT = protocol.VLLM_ACCEPTED_PER_POSITION
_WORKER_METRICS = [  # part of a worker's counts, field of the part, name, label, help
    *_rows(
        """
        work requests paceline_worker_requests -
            Requests that have ended.
        work tokens paceline_worker_tokens kind
            Tokens of requests that have ended (prompt, completion).
        work untold paceline_worker_unreported_answers number
            Answers whose engine did not report usage, cached_tokens or drafts.
        steps steps paceline_worker_steps -
            Decoding steps, each for one batch.
        steps ahead paceline_worker_steps_ahead -
            Steps that the worker read while the device computed another one.
        prefix hits paceline_worker_prefix_hits -
            Prompts with a prefix found in the cache.
        prefix misses paceline_worker_prefix_misses -
            Prompts with a prefix not found in the cache.
        prefix cached_tokens paceline_worker_prefix_cached_tokens -
            Prompt tokens found in the cache.
        prefix tokens_by_kind paceline_worker_prefix_reused_tokens kind
            Prompt tokens found in the cache, by kind.
        saved prefill_s paceline_worker_prefix_saved_seconds -
            Estimated prefill time that the prefix cache saved.
        saved decode_s paceline_worker_drafting_saved_seconds -
            Estimated decode time that drafting saved, less its cost.
        """
    ),
    *(("drafts", field, name, "-", text) for field, (name, text) in protocol.VLLM_COUNTERS.items()),
    ("drafts", "accepted_at", _ACCEPTED_AT, "position", _ACCEPTED_AT_TEXT),
    *(
        ("drafts", field, name, "source", text)
        for field, (name, text) in protocol.COUNTERS_BY_SOURCE.items()
    ),
]
_FALLING = "decode_s"
"""It falls if drafting costs more than it saves."""


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
        for family, name, labels, text in _COUNTERS:
            metric = CounterMetricFamily(f"paceline_{name}", text, labels=_names(labels))
            found = {key[1:]: count for key, count in totals.items() if key[0] == family}
            if labels == "-":
                found.setdefault((), 0)
            for values, count in sorted(found.items()):
                metric.add_metric(values, count)
            yield metric
        lanes = self._accounting.lane_stats()
        for field, name, least, most, labels, text in _HISTOGRAMS:
            bounds_s = [bound for bound in _SHOWN_S if float(least) <= bound <= float(most)]
            yield _histogram(lanes, name, text, bounds_s, field, labels=_names(labels))


class WorkerMetrics(Collector):
    """Sums over all boots of each worker, so that counters do not fall when a worker restarts.

    `counts` are the gateways' counts of engines that send no reports. A number that such an engine
    does not report has no sample: 0 would be wrong.
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
        workers = {key: self._parts(key, lanes) for key, lanes in sorted(self._lanes.items())}
        for part, field, name, label, text in _WORKER_METRICS:
            family = GaugeMetricFamily if field == _FALLING else CounterMetricFamily
            metric = family(name, text, labels=(*_WORKER_LABELS, *_names(label)))
            for key, parts in workers.items():
                found = getattr(parts[part], field) if part in parts else {}
                by_label = found if isinstance(found, Mapping) else {"": found}
                for value, count in sorted(by_label.items()):
                    metric.add_metric((*key, str(value)) if label != "-" else key, count)
            yield metric

    def _parts(
        self, key: tuple[str, str], lanes: Sequence[protocol.LaneReport]
    ) -> dict[str, SimpleNamespace | protocol.PrefixCounts]:
        """Return the known counts of one model of a worker."""
        untold: Counter[str] = Counter()
        for place, numbers in self._untold.items():
            if (place.model, place.worker_id) == key:
                untold.update(numbers)
        parts: dict[str, SimpleNamespace | protocol.PrefixCounts] = {
            "work": SimpleNamespace(
                requests=sum(lane.requests for lane in lanes),
                tokens={
                    "prompt": sum(lane.prompt_tokens for lane in lanes),
                    "completion": sum(lane.completion_tokens for lane in lanes),
                },
                untold=untold,
            )
        }
        if drafting := [lane.speculation for lane in lanes if lane.mtp_enabled]:
            total = sum(drafting, protocol.Speculation())
            accepted_at = dict(enumerate(total.accepted_per_position))
            parts["drafts"] = SimpleNamespace(**dict(total), accepted_at=accepted_at)
        if steps := sum(lane.steps for lane in lanes):
            ahead = sum(lane.steps_ahead for lane in lanes)
            parts["steps"] = SimpleNamespace(steps=steps, ahead=ahead)
        prefix = sum((lane.prefix for lane in lanes), protocol.PrefixCounts())
        if key[1] not in self._engines or prefix.hits + prefix.misses:
            saved = sum((lane.time_saved for lane in lanes), protocol.TimeSaved())
            prefill_s, decode_s = saved.prefill_ms / 1000, saved.decode_ms / 1000
            parts["prefix"] = prefix
            parts["saved"] = SimpleNamespace(prefill_s=prefill_s, decode_s=decode_s)
        return parts


def _names(labels: str) -> list[str]:
    return labels.split(",") if labels != "-" else []


def _histogram(
    lanes: Mapping[LaneKey, LaneStats],
    name: str,
    text: str,
    bounds_s: Sequence[float],
    field: str,
    *,
    labels: Sequence[str],
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
