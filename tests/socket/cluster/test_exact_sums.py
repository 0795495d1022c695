"""Exact token sums: responses == workers == fleet == Prometheus.

The tests simulate a fleet with the real parts of gateways on a real Redis: workers serve, restart
and crash, reports arrive late, twice and out of order, gateways restart, and clocks jump.
"""

from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.state.counters import MAX_BOOTS
from gateway.telemetry.prometheus import GatewayMetrics, exposition
from tests.support.simulated_fleet import SimulatedGateway, SimulatedRedisGateway, Simulation

OFTEN = ["answer"] * 6 + ["beat"] * 3 + ["deliver"] * 3
SELDOM = ["restart worker", "sync", "restart gateway", "jump"]
EVENTS = st.lists(st.sampled_from(OFTEN + SELDOM), max_size=60)
QUICK = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@QUICK
@given(EVENTS, st.integers(0, 2**32))
async def test_sums_are_exact_over_restarts_of_workers_and_gateways(redis, events, seed) -> None:
    redis.client.flushall()
    async with AsyncExitStack() as stack:

        def start_gateway() -> SimulatedGateway:
            gateway = SimulatedRedisGateway(redis, lambda: simulation.unix_s)
            stack.push_async_callback(gateway.close)
            return gateway

        simulation = Simulation([], seed)
        simulation.gateways += [start_gateway(), start_gateway()]
        for event in events:
            match event:
                case "sync":
                    await simulation.dice.choice(simulation.gateways).sync()
                case "restart gateway":
                    number = simulation.dice.randrange(2)
                    await simulation.gateways[number].sync()  # its last sync
                    simulation.gateways[number] = start_gateway()
                case _:
                    await simulation.play(event)
        await simulation.settle()
        await simulation.check()


@QUICK
@given(EVENTS, st.integers(0, 2**32))
async def test_sums_of_one_gateway_without_redis_are_exact(events: list[str], seed: int) -> None:
    simulation = Simulation([], seed)
    simulation.gateways.append(SimulatedGateway(lambda: simulation.unix_s))
    for event in events:
        if event not in ("sync", "restart gateway"):  # only with Redis
            await simulation.play(event)
    await simulation.settle()
    await simulation.check()
    (gateway,) = simulation.gateways
    totals = list(gateway.accounting.lane_totals().items())
    names = {"attempted": "drafted", "accepted": "accepted", "completion": "completion_tokens"}
    for name, field in names.items():
        total = sum(getattr(lane, field) for _, lane in totals)
        assert total == simulation.expected_counts["fleet", name], "windows use the same counters"
    text = exposition(GatewayMetrics(gateway.accounting)).decode()
    scraped = {
        (sample.labels["model_name"], sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "paceline_tokens_total"
    }
    for (model, kind), count in scraped.items():
        assert count == simulation.expected_counts["model", model, kind]


@pytest.mark.parametrize("shared", [False, True])
async def test_a_report_after_its_boot_was_folded_is_not_counted_again(redis, shared) -> None:
    simulation = Simulation([], 7)
    wall = lambda: simulation.unix_s  # noqa: E731
    start_gateway = (
        (lambda: SimulatedRedisGateway(redis, wall)) if shared else lambda: SimulatedGateway(wall)
    )
    simulation.gateways += [start_gateway() for _ in range(1 + shared)]
    simulation.workers = simulation.workers[:1]
    first, *rest = simulation.gateways
    for _ in range(MAX_BOOTS + 4):
        simulation.answer()
        await first.store.store_report(simulation.workers[0].report())
        await first.sync()
        simulation.restart_worker()
    for gateway in (first, *rest):
        for _ in range(8):
            await gateway.sync()
        for report in simulation.pending_reports:
            await gateway.store.store_report(report)
        await gateway.sync()
    simulation.pending_reports.clear()
    await simulation.settle()
    await simulation.check()
    for gateway in simulation.gateways:
        assert len(await gateway.store.reports()) <= MAX_BOOTS + 2
        await gateway.close()
