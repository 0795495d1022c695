"""To the token: sum over answers == worker == fleet == Prometheus, whatever happens on the way.

A fleet is simulated with the real parts of gateways on a real Redis: workers answer, restart and
crash, their reports come late, twice and out of order, gateways restart, and clocks jump.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.storage.counters import MAX_BOOTS
from gateway.telemetry.prometheus import GatewayMetrics, exposition
from tests.support.redis_server import RedisServer
from tests.support.simulated_fleet import SimulatedGateway, SimulatedRedisGateway, Simulation

EVENTS = st.lists(
    st.sampled_from(
        ["answer"] * 6
        + ["beat"] * 3
        + ["deliver"] * 3
        + ["restart worker", "turn", "restart gateway", "jump"]
    ),
    max_size=60,
)
QUICK = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@QUICK
@given(EVENTS, st.integers(0, 2**32))
async def test_sums_are_exact_over_restarts_of_workers_and_gateways(
    redis: RedisServer, events: list[str], seed: int
) -> None:
    redis.client.flushall()
    async with AsyncExitStack() as stack:

        def begin() -> SimulatedGateway:
            gateway = SimulatedRedisGateway(redis, lambda: simulation.unix_s)
            stack.push_async_callback(gateway.close)
            return gateway

        simulation = Simulation([], seed)
        simulation.gateways += [begin(), begin()]
        for event in events:
            match event:
                case "turn":
                    await simulation.dice.choice(simulation.gateways).sync()
                case "restart gateway":
                    number = simulation.dice.randrange(2)
                    await simulation.gateways[number].sync()  # its last words
                    simulation.gateways[number] = begin()
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
        if event not in ("turn", "restart gateway"):  # of a gateway with Redis
            await simulation.play(event)
    await simulation.settle()
    await simulation.check()
    (gateway,) = simulation.gateways
    figures = list(gateway.accounting.lane_totals().items())
    for place, total in (
        ("drafts", sum(one.drafts for _, one in figures)),
        ("attempted", sum(one.drafted for _, one in figures)),
        ("accepted", sum(one.accepted for _, one in figures)),
        ("completion", sum(one.completion_tokens for _, one in figures)),
    ):
        assert total == simulation.expected_counts["fleet", place], (
            "windows are computed from the same counters"
        )
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
async def test_a_report_that_comes_after_its_boot_was_folded_counts_nothing_again(
    redis: RedisServer, shared: bool
) -> None:
    simulation = Simulation([], 7)
    wall = lambda: simulation.unix_s  # noqa: E731
    begin = (
        (lambda: SimulatedRedisGateway(redis, wall)) if shared else lambda: SimulatedGateway(wall)
    )
    simulation.gateways += [begin()] if not shared else [begin(), begin()]
    simulation.workers = simulation.workers[:1]
    first, *others = simulation.gateways
    for _ in range(MAX_BOOTS + 4):
        simulation.answer()
        await first.store.store_report(simulation.workers[0].report())
        await first.sync()
        simulation.restart_worker()
    for gateway in (first, *others):
        for _ in range(8):
            await gateway.sync()
        for letter in simulation.pending_reports:
            await gateway.store.store_report(letter)
        await gateway.sync()
    simulation.pending_reports.clear()
    await simulation.settle()
    await simulation.check()
    for gateway in simulation.gateways:
        assert len(await gateway.store.reports()) <= MAX_BOOTS + 2
        await gateway.close()
