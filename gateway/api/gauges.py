"""What is so at this moment, for `/metrics`: slots, lines, and workers that are left alone."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.assembly import Gateway
from gateway.proxy.handler import ProxyHandler


class Gauges(Collector):
    """Read anew each time they are asked for, so that no request pays for them."""

    def __init__(self, gateway: Gateway, proxy: ProxyHandler) -> None:
        self._gateway = gateway
        self._load = proxy.load
        self._upstream = proxy.upstream
        self._fleet = gateway.fleet

    def collect(self) -> Iterable[Metric]:
        """Give one family for each figure."""
        yield GaugeMetricFamily(
            "paceline_requests_in_flight", "Requests that run now.", value=self._load.requests
        )
        yield GaugeMetricFamily(
            "paceline_event_loop_lag_seconds",
            "The longest delay of the event loop in the last ten seconds.",
            value=self._load.lag.worst_s,
        )
        yield from self._pools()
        yield from self._workers()
        yield CounterMetricFamily(
            "paceline_retries_denied",
            "Further attempts not made because too many were being made.",
            value=self._upstream.retries.denied,
        )
        yield GaugeMetricFamily(
            "paceline_quarantined_bodies",
            "Request bodies not sent any more because two workers were lost over each.",
            value=len(self._upstream.quarantine),
        )
        yield GaugeMetricFamily(
            "paceline_policy_version",
            "The version of the policy that is in force.",
            value=self._gateway.policy_store.version.number,
        )
        yield GaugeMetricFamily(
            "paceline_policy_file_refused",
            "1 while the policy file says something that cannot be in force.",
            value=bool(self._gateway.policy_file.problem),
        )
        yield GaugeMetricFamily(
            "paceline_store_degraded",
            "1 while something cannot be shared with other gateways over Redis.",
            value=bool(self._gateway.cluster_sync.problem),
        )

    def _pools(self) -> Iterable[Metric]:
        slots = _gauge("pool_slots", "Slots of workers that take requests now.", "pool")
        in_flight = _gauge("pool_in_flight", "Requests that hold a slot.", "pool")
        waiting = _gauge("pool_waiting", "Requests in line for a slot.", "pool")
        for name, pool in self._gateway.policy_store.current.pools.items():
            lanes = self._fleet.pool_lanes(name, pool)
            open_slots = sum(
                lane.slots for member, lane in lanes if self._fleet.is_available(member)
            )
            slots.add_metric([name], pool.bounded(open_slots))
            in_flight.add_metric([name], self._gateway.scheduler.running(name))
            waiting.add_metric([name], self._gateway.scheduler.waiting(name))
        return slots, in_flight, waiting

    def _workers(self) -> Iterable[Metric]:
        is_open = _gauge("worker_open", "1 where a worker gets requests, 0 where not.", "worker")
        ejections = _gauge(
            "worker_ejections", "Ejections of a worker that are not yet forgiven.", "worker"
        )
        in_flight = _gauge("worker_in_flight", "Requests that hold a slot.", "worker", "lane")
        for member in self._fleet.workers():
            worker_id = member.report.worker_id
            is_open.add_metric([worker_id], self._fleet.is_available(member))
            ejections.add_metric([worker_id], member.breaker.ejections)
            for lane in member.report.lanes:
                in_flight.add_metric([worker_id, lane.name], member.in_flight[lane.name])
        return is_open, ejections, in_flight


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"paceline_{name}", text, labels=labels)
