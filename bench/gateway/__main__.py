"""CPU cost of the gateway, compared with nginx, two routers in Rust and LiteLLM in one run.

`python -m bench.gateway` makes a virtual environment for each peer and starts all of them in front
of one worker that answers faster than any of them proxies. Each repetition measures them in another
order. Our gateway runs with a key and all defaults (policy, accounting, metrics); its peers run
without keys. CPU time is that of the process and its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple

from bench.gateway import backend, tables
from bench.gateway.contenders import OURS, OVER_TLS, PEERS, running_backend, running_gateway
from bench.gateway.load import Question, Wire, WrongAnswer, send_requests, send_staggered
from bench.harness.options import parser, peers_option
from bench.harness.process_cost import cpu_s
from bench.harness.samples import Samples, rotated
from bench.harness.tables import Grid, console, failures, provenance, report
from bench.harness.venvs import PeerUnavailable
from gateway.event_loop import run

_CONCURRENCY: Final = 16


class Plan(NamedTuple):
    """The size of a run."""

    repetitions: int
    requests: int
    streams: int
    """Concurrent streams, paced and staggered."""
    rounds: int
    """Repetitions of each stream."""
    budget_s: float
    """The longest time for one metric of one gateway in a repetition."""


FULL: Final = Plan(repetitions=5, requests=3000, streams=50, rounds=5, budget_s=20)
QUICK: Final = Plan(repetitions=1, requests=60, streams=50, rounds=1, budget_s=3)


class Measured(NamedTuple):
    """A gateway, or the worker without one, whose process is 0."""

    name: str
    port: int
    process_id: int = 0

    def cpu_s(self) -> float:
        return cpu_s(self.process_id) if self.process_id else 0.0


async def measure_all(plan: Plan, names: Sequence[str], folder: Path) -> dict[str, Samples]:
    """Measure the worker without a gateway, our gateway and the peers of these names."""
    samples = {name: Samples() for name in (tables.DIRECT, OURS.name, OVER_TLS.name, *names)}
    async with AsyncExitStack() as stack:
        worker_port = await stack.enter_async_context(running_backend())
        gateways = [Measured(tables.DIRECT, worker_port)]
        for contender in (OURS, OVER_TLS, *(peer for peer in PEERS if peer.name in names)):
            console().print(f"starting {contender.name}, installing it if it is missing")
            try:
                started = running_gateway(contender, folder, worker_port)
                server = await stack.enter_async_context(started)
                gateways.append(Measured(server.name, server.port, server.process_id))
            except PeerUnavailable as reason:
                samples[contender.name].failures["start"] = str(reason)
        for repetition in range(plan.repetitions):
            for gateway in rotated(gateways, repetition):
                console().print(f"{repetition + 1}/{plan.repetitions} {gateway.name}")
                await _measure(gateway, plan, samples[gateway.name])
    return samples


async def _measure(gateway: Measured, plan: Plan, samples: Samples) -> None:
    try:
        for wire in Wire if gateway.name == OURS.name else (Wire.CHAT,):
            for stream in (False, True):
                question = Question(stream=stream, wire=wire)
                warm_up = plan.requests // 10
                await send_requests(gateway.port, question, warm_up, _CONCURRENCY, 5)
                before_s = gateway.cpu_s()
                sizes = plan.requests, _CONCURRENCY, plan.budget_s
                completed = await send_requests(gateway.port, question, *sizes)
                name = tables.metric(wire, stream=stream)
                samples.add(name, (gateway.cpu_s() - before_s) / completed)
        before_s = gateway.cpu_s()
        times_s = await send_staggered(gateway.port, streams=plan.streams, rounds=plan.rounds)
        events = len(times_s) * backend.EVENTS
        samples.add("event_cpu_s", (gateway.cpu_s() - before_s) / events)
        samples.add("first_word_s", *times_s)
    except* (WrongAnswer, TimeoutError, OSError) as errors:
        samples.failures["answers"] = repr(errors.exceptions[0])[:300]


def main() -> None:
    made = parser("gateway", __doc__)
    peers_option(made, [peer.name for peer in PEERS])
    made.add_argument("--repetitions", type=int, default=FULL.repetitions)
    options = made.parse_args()
    plan = QUICK if options.quick else FULL._replace(repetitions=options.repetitions)
    samples = run(measure_all(plan, options.peers, options.folder))
    pins = sorted(pin for peer in PEERS for pin in peer.pins)
    about = (
        f"{provenance()}; {plan.repetitions} repetitions, each up to {plan.requests} requests of "
        f"a kind, {_CONCURRENCY} at once; peers: {', '.join(pins)}."
    )
    parts: list[str | Grid] = [*tables.grids(samples), "\n".join(failures(samples))]
    report("gateway.md", "Gateway", about, *parts, write=not options.quick)


if __name__ == "__main__":
    main()
