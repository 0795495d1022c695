"""Cost of a routing decision by the number of workers: `python -m bench.fleet.cost`.

Measured are the steps of one request: the view of the fleet, the holders of its conversation, the
decision, and a slot acquired and released. Each decision follows a change of the fleet, as under
load. Times are CPU times of this process, the minimum of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random
from statistics import median
from typing import Final, NamedTuple

from bench.harness.tables import Grid, report
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import WorkerRegistry
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.prefix_keys import PrefixEnd, PrefixKeys
from gateway.routing.select import RoutingRequest, decide
from paceline.protocol import LaneReport, WorkerReport
from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.document import default_policy

_INTRODUCTION: Final = """\
`python -m bench.fleet.cost`: the view of the fleet, the holders of the conversation, and the
decision; then the same after a change of the fleet, with a slot acquired and released, as under
load. CPU time of one process, minimum and median of all runs.
"""
TARGET_US: Final = 60.0
_WORKERS: Final = (1, 2, 4, 8, 16, 64)
_DECISIONS: Final = 400
_PROMPTS: Final = 10_000
_TURNS: Final = 10
_RUNS: Final = 25
_MODEL: Final = "demo"
_SAMPLED: Final = RequestProfile(endpoint=Endpoint.CHAT, model=_MODEL, text_chars=8000)
_KINDS: Final = (
    ("sampled", _SAMPLED),
    ("greedy", _SAMPLED._replace(sampling=Sampling(temperature=0))),
)


class Cost(NamedTuple):
    """CPU microseconds of one request: of the decision, and with its slot."""

    decision_us: float
    median_us: float
    with_slot_us: float


def _reports(workers: int) -> Iterator[WorkerReport]:
    rng = Random(1)
    for number in range(workers):
        lanes = [
            LaneReport(name=name, slots=8, mtp_enabled=name == "text-mtp",
                       draft_tokens_by_rows=(2, 2, 1, 1, 0, 0, 0, 0),
                       prefill_tokens_per_s=rng.uniform(500, 3000),
                       decode_tokens_per_s=rng.uniform(20, 80),
                       pending_prefill_tokens=rng.randrange(3000), running=rng.randrange(4))
            for name in ("text-mtp", "vlm")
        ]  # fmt: skip
        yield WorkerReport(
            worker_id=f"mac-{number}",
            boot_id="1",
            url=f"http://mac-{number}:9200",
            model=_MODEL,
            context_tokens=8192,
            lanes=tuple(lanes),
        )


def _prompt(number: int) -> PrefixKeys:
    messages = 2 * _TURNS
    ends = [
        PrefixEnd(f"{number:04}{at:04}".encode(), 1000 * at, at) for at in range(messages, 0, -1)
    ]
    return PrefixKeys(tuple(ends), has_system=True, unscoped=b"")


def measure(workers: int, profile: RequestProfile) -> Cost:
    """Measure decisions over a fleet, each of a conversation that three workers hold."""
    rng, policy, reports = Random(2), default_policy(), tuple(_reports(workers))
    fleet = WorkerRegistry(time.monotonic, rng.random)
    prefixes = PrefixIndex(time.monotonic)
    prompts = tuple(_prompt(number) for number in range(_PROMPTS))
    for number, prompt in enumerate(prompts):
        for copy in range(min(3, workers)):
            boot = f"mac-{(number + copy) % workers}", "1"
            prefixes.record_dispatch(prompt, boot, policy.prefix)
    requests = [
        RoutingRequest(policy, profile, prefix=rng.choice(prompts)) for _ in range(_DECISIONS)
    ]

    def send_heartbeats() -> None:
        for one in reports:
            fleet.heartbeat(one)

    send_heartbeats()
    view = fleet.view()
    caches = [prefixes.cached(request.prefix) for request in requests]

    def take_views() -> None:
        for request in requests:
            fleet.view()
            prefixes.cached(request.prefix)

    def decide_all() -> None:
        for request, cached in zip(requests, caches, strict=True):
            decide(request, view, time.monotonic(), rng, cached, first_only=True)

    def dispatch_all() -> None:
        for request in requests:
            cached = prefixes.cached(request.prefix)
            decision = decide(request, fleet.view(), time.monotonic(), rng, cached, first_only=True)
            for candidate in decision.candidates:
                if (lease := fleet.acquire(candidate)) is not None:
                    fleet.release(lease, AttemptResult.SUCCEEDED)
                    break
            else:
                raise SystemExit("A lane had no free slot, so the measurement is wrong.")

    view_us, decision_us, dispatch_us = (
        _measure_runs(function, send_heartbeats)
        for function in (take_views, decide_all, dispatch_all)
    )
    return Cost(
        min(view_us) + min(decision_us), median(view_us) + median(decision_us), min(dispatch_us)
    )


def _measure_runs(function: Callable[[], None], send_heartbeats: Callable[[], None]) -> list[float]:
    """Return the microseconds per decision of every run; workers send heartbeats between runs."""
    runs_us = []
    for _ in range(_RUNS):
        send_heartbeats()
        started_s = time.process_time()
        function()
        runs_us.append((time.process_time() - started_s) / _DECISIONS * 1e6)
    return runs_us


def main() -> None:
    rows, reached_us = [], 0.0
    for workers in _WORKERS:
        for kind, profile in _KINDS:
            cost = measure(workers, profile)
            rows.append((f"{workers}, {kind}", *(f"{figure:.1f}" for figure in cost)))
            if workers == _WORKERS[-1]:
                reached_us = max(reached_us, cost.decision_us)
    title = f"CPU microseconds of a decision, with {_PROMPTS:,} conversations of {_TURNS} turns"
    columns = ("workers, request", "decision, minimum", "... median")
    grid = Grid(title, (*columns, "with slot and change, minimum"), rows)
    met = "met" if reached_us <= TARGET_US else "NOT met"
    result = f"Target: at most {TARGET_US:.0f} us with {_WORKERS[-1]} workers; {met}."
    report("fleet_cost.md", "Cost of a routing decision", _INTRODUCTION, grid, result)


if __name__ == "__main__":
    main()
