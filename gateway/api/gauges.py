"""Gauges for `/metrics`: slots, queues, availability of workers, policy and store."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.assembly import Gateway
from gateway.proxy.handler import ProxyHandler


class Gauges(Collector):
    """Momentary values, read at each scrape."""

    def __init__(self, gateway: Gateway, proxy: ProxyHandler) -> None:
        self._gateway = gateway
        self._load = proxy.load
        self._forwarder = proxy.forwarder

    def collect(self) -> Iterable[Metric]:
        """Yield one family for each metric."""
        gateway, load = self._gateway, self._load
        yield from self._pools()
        yield from self._workers()
        yield CounterMetricFamily(
            "paceline_retries_delayed",
            "Retries that waited because the retry budget was spent.",
            value=self._forwarder.retries.delayed,
        )
        lag = "The longest delay of the event loop in the last ten seconds."
        quarantined = "Request bodies blocked because two workers crashed while processing them."
        refused = "1 while the policy file is invalid and therefore not active."
        degraded = "1 while this gateway cannot exchange state with others over Redis."
        started = "When this gateway started, in seconds since the epoch."
        unwritable = "1 while the state folder cannot be read or written."
        for name, text, value in (
            ("requests_in_flight", "Requests in progress.", load.requests),
            (
                "memory_held_bytes",
                "Memory that the gateway holds for clients, at most 1 GiB.",
                gateway.memory.held_bytes,
            ),
            ("event_loop_lag_seconds", lag, load.lag.worst_s),
            ("quarantined_bodies", quarantined, len(self._forwarder.quarantine)),
            (
                "policy_version",
                "The active version of the policy.",
                gateway.policy_store.version.number,
            ),
            ("start_time_seconds", started, gateway.wall() - gateway.clock() + gateway.began_s),
            ("policy_file_refused", refused, bool(gateway.policy_file.rejection)),
            ("store_degraded", degraded, bool(gateway.cluster_sync.problem)),
            ("state_unwritable", unwritable, bool(gateway.cluster_sync.records.problem)),
        ):
            yield GaugeMetricFamily(f"paceline_{name}", text, value=value)

    def _pools(self) -> Iterable[Metric]:
        gateway = self._gateway
        slots = _gauge("pool_slots", "Slots of available workers.", "pool")
        in_flight = _gauge("pool_in_flight", "Requests that hold a slot.", "pool")
        waiting = _gauge("pool_waiting", "Requests queued for a slot.", "pool")
        for name, pool in gateway.policy_store.current.pools.items():
            lanes = gateway.fleet.pool_lanes(name, pool)
            available = [lane for worker, lane in lanes if gateway.fleet.is_available(worker)]
            slots.add_metric([name], pool.usable_slots(sum(lane.slots for lane in available)))
            in_flight.add_metric([name], gateway.scheduler.running(name))
            waiting.add_metric([name], gateway.scheduler.waiting(name))
        return slots, in_flight, waiting

    def _workers(self) -> Iterable[Metric]:
        fleet = self._gateway.fleet
        available = _gauge("worker_available", "1 if the worker gets requests.", "worker")
        cordoned = _gauge("worker_cordoned", "1 if an admin has cordoned the worker.", "worker")
        taken = _gauge("worker_id_taken", "1 if another worker wants its id.", "worker")
        ejections = _gauge(
            "worker_ejections", "Ejections in a row, without a recovery between them.", "worker"
        )
        in_flight = _gauge("worker_in_flight", "Requests that hold a slot.", "worker", "lane")
        for worker in fleet.workers():
            worker_id = worker.report.worker_id
            available.add_metric([worker_id], fleet.is_available(worker))
            cordoned.add_metric([worker_id], worker.cordoned)
            taken.add_metric([worker_id], worker.has_rival)
            ejections.add_metric([worker_id], worker.breaker.ejections)
            for lane in worker.report.lanes:
                in_flight.add_metric([worker_id, lane.name], worker.in_flight[lane.name])
        for worker_id, absence in fleet.absences().items():
            if absence.kind != "left":
                available.add_metric([worker_id], 0)
                cordoned.add_metric([worker_id], worker_id in self._gateway.cordons.by_worker)
        return available, cordoned, taken, ejections, in_flight


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paceline_{name}", text, labels=labels)
