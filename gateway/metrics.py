"""`/metrics`: the gateway's own figures, and vLLM's names over the workers' reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from gateway.domain import Served
from workers.adapters.report import Speculation, WorkerReport

# From what a relay adds at its best (a tenth of a millisecond) to what must alarm.
_ADDED_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_FIRST_TOKEN_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Meters:
    """The gateway's own metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "paceline_requests",
            "Finished requests.",
            ["pool", "reason", "status"],
            registry=self.registry,
        )
        self._retries = Counter(
            "paceline_retries",
            "Attempts at a further worker, before the first byte.",
            registry=self.registry,
        )
        self._prefixes = Counter(
            "paceline_prefixes",
            "Answered requests by what became of their system prompt: hit, miss, none.",
            ["result"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "paceline_requests_in_flight", "Requests that run now.", registry=self.registry
        )
        self.loop_lag = Gauge(
            "paceline_event_loop_lag_seconds",
            "The longest delay of the event loop in the last ten seconds.",
            registry=self.registry,
        )
        self._first_token = Histogram(
            "paceline_time_to_first_token_seconds",
            "From the whole body read to the first content of a stream.",
            ["pool"],
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=self.registry,
        )
        self._added = Histogram(
            "paceline_added_latency_seconds",
            "From the whole body read to the request handed to a worker.",
            buckets=_ADDED_BUCKETS_S,
            registry=self.registry,
        )

        self._queue_wait = Histogram(
            "paceline_queue_wait_seconds",
            "In line for a slot, of requests that had to wait and got one.",
            ["pool"],
            buckets=_FIRST_TOKEN_BUCKETS_S,
            registry=self.registry,
        )

    def request(self, served: Served, pool: str) -> None:
        """Enter one finished request."""
        reason = served.candidate.reason if served.candidate else "none"
        self._requests.labels(pool, reason, str(served.status)).inc()
        self._prefixes.labels(served.prefix).inc()
        if served.attempts > 1:
            self._retries.inc(served.attempts - 1)
        if served.first_token_s is not None:
            self._first_token.labels(pool).observe(served.first_token_s)
        if served.added_s is not None:
            self._added.observe(served.added_s)
        if served.waited_s:
            self._queue_wait.labels(pool).observe(served.waited_s)


def exposition(meters: Meters, reports: Iterable[WorkerReport], gauges: Collector) -> bytes:
    """Render all metrics in Prometheus' text format."""
    fleet = CollectorRegistry()
    fleet.register(_FleetSpeculation(reports))
    fleet.register(gauges)
    return generate_latest(meters.registry) + generate_latest(fleet)


class _FleetSpeculation(Collector):
    """vLLM's four counters: a line for each worker and model, none for all: readers sum lines."""

    def __init__(self, reports: Iterable[WorkerReport]) -> None:
        self._totals: dict[tuple[str, str], Speculation] = {}
        for report in reports:
            key = (report.model, report.worker_id)
            for lane in report.lanes:
                if lane.mtp_enabled:
                    self._totals[key] = self._totals.get(key, Speculation()) + lane.speculation

    def collect(self) -> Iterator[CounterMetricFamily]:
        labels = ["model_name", "worker"]
        drafts = CounterMetricFamily(
            "vllm:spec_decode_num_drafts", "Verifies of drafts.", labels=labels
        )
        drafted = CounterMetricFamily(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted.", labels=labels
        )
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", labels=labels
        )
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=[*labels, "position"],
        )
        for key, total in sorted(self._totals.items()):
            drafts.add_metric(key, total.steps)
            drafted.add_metric(key, total.drafted)
            accepted.add_metric(key, total.accepted)
            for position, count in enumerate(total.accepted_per_position):
                by_position.add_metric([*key, str(position)], count)
        yield from (drafts, drafted, accepted, by_position)
