"""Gauges for `/metrics`: slots, queues, availability of workers, policy and store."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.assembly import Gateway
from gateway.proxy.handler import ProxyHandler
from gateway.telemetry.speculation_and_reuse import alarm_of


class Gauges(Collector):
    """Momentary values, read at each scrape."""

    def __init__(self, gateway: Gateway, proxy: ProxyHandler) -> None:
        self._gateway = gateway
        self._load = proxy.load
        self._forwarder = proxy.forwarder
        self._fleet = gateway.fleet

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each metric."""
        yield from self._pools()
        yield from self._workers()
        yield CounterMetricFamily(
            "paceline_retries_delayed",
            "Retries that waited because the retry budget was spent.",
            value=self._forwarder.retries.delayed,
        )
        history = self._gateway.stats_history
        alarm = alarm_of(history, history.take_snapshot())
        for name, text, value in (
            ("requests_in_flight", "Requests in progress.", self._load.requests),
            (
                "memory_held_bytes",
                "Memory that is held for clients, of 1 GiB at most.",
                self._gateway.memory.held_bytes,
            ),
            (
                "event_loop_lag_seconds",
                "The longest delay of the event loop in the last ten seconds.",
                self._load.lag.worst_s,
            ),
            (
                "quarantined_bodies",
                "Request bodies blocked because two workers crashed while processing them.",
                len(self._forwarder.quarantine),
            ),
            (
                "policy_version",
                "The version of the policy that is active.",
                self._gateway.policy_store.version.number,
            ),
            (
                "policy_file_refused",
                "1 while the policy file is invalid and therefore not active.",
                bool(self._gateway.policy_file.rejection),
            ),
            (
                "speculation_or_reuse_lost",
                "1 if a worker lost drafts or reuse within ten minutes where both are possible.",
                bool(alarm.problem),
            ),
            (
                "store_degraded",
                "1 while this gateway cannot exchange state with others over Redis.",
                bool(self._gateway.cluster_sync.problem),
            ),
        ):
            yield GaugeMetricFamily(f"paceline_{name}", text, value=value)

    def _pools(self) -> Iterable[Metric]:
        slots = _gauge("pool_slots", "Slots of available workers.", "pool")
        in_flight = _gauge("pool_in_flight", "Requests that hold a slot.", "pool")
        waiting = _gauge("pool_waiting", "Requests queued for a slot.", "pool")
        for name, pool in self._gateway.policy_store.current.pools.items():
            lanes = self._fleet.pool_lanes(name, pool)
            available_slots = sum(
                lane.slots for worker, lane in lanes if self._fleet.is_available(worker)
            )
            slots.add_metric([name], pool.usable_slots(available_slots))
            in_flight.add_metric([name], self._gateway.scheduler.running(name))
            waiting.add_metric([name], self._gateway.scheduler.waiting(name))
        return slots, in_flight, waiting

    def _workers(self) -> Iterable[Metric]:
        available = _gauge("worker_available", "1 if the worker is given requests.", "worker")
        ejections = _gauge(
            "worker_ejections", "Ejections in a row, without a recovery between them.", "worker"
        )
        in_flight = _gauge("worker_in_flight", "Requests that hold a slot.", "worker", "lane")
        for worker in self._fleet.workers():
            worker_id = worker.report.worker_id
            available.add_metric([worker_id], self._fleet.is_available(worker))
            ejections.add_metric([worker_id], worker.breaker.ejections)
            for lane in worker.report.lanes:
                in_flight.add_metric([worker_id, lane.name], worker.in_flight[lane.name])
        return available, ejections, in_flight


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paceline_{name}", text, labels=labels)
