"""What a decision costs, by how many workers there are: `python -m bench.fleet.cost`.

Timed is all that a request pays for where it goes: the look at the fleet, who holds its system
prompt, the decision, its slot taken and given back. Each decision follows on a change of the fleet,
as it does under load. CPU time of this process, the quietest of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

from rich.console import Console

from bench.harness.tables import Grid
from gateway.fleet.circuit_breaker import AttemptResult
from gateway.fleet.registry import WorkerRegistry
from gateway.routing.prefix_affinity import MAX_PREFIXES, PrefixIndex
from gateway.routing.select import RoutingRequest, decide
from policies.document import default_policy
from policies.request.profile import Endpoint, RequestProfile, Sampling
from workers.protocol import LaneReport, WorkerReport

RESULTS: Final = Path(__file__).parents[1] / "results" / "fleet_cost.md"
_ABOUT: Final = """\
# What a decision costs

`python -m bench.fleet.cost`: the look at the fleet, who holds the system prompt, and the decision;
then the same after a change of the fleet, with a slot taken and given back, as under load. CPU time
of one process, the quietest run and the middle one.
"""
PROMISED_US: Final = 60.0
_WORKERS: Final = (1, 2, 4, 8, 16, 64)
_DECISIONS: Final = 400
_RUNS: Final = 25
_MODEL: Final = "demo"
_SAMPLED: Final = RequestProfile(endpoint=Endpoint.CHAT, model=_MODEL, text_chars=8000)
_KINDS: Final = (
    ("sampled", _SAMPLED),
    ("greedy", _SAMPLED._replace(sampling=Sampling(temperature=0))),
)


class Cost(NamedTuple):
    """CPU microseconds of one request: of the decision, and of all around its slot."""

    decision_us: float
    median_us: float
    whole_us: float


def _reports(workers: int) -> Iterator[WorkerReport]:
    """Tell of workers that have measured their speeds and are busy to some degree."""
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


def measure(workers: int, profile: RequestProfile) -> Cost:
    """Time decisions over a fleet, each with a system prompt that three workers hold."""
    rng, policy, reports = Random(2), default_policy(), tuple(_reports(workers))
    fleet = WorkerRegistry(time.monotonic, rng.random)
    prefixes = PrefixIndex(time.monotonic)
    for number in range(MAX_PREFIXES):
        for copy in range(min(3, workers)):
            holding = f"mac-{(number + copy) % workers}", "1"
            prefixes.record_dispatch(str(number), holding, policy.prefix)
    cases = [
        RoutingRequest(policy, profile, prefix_key=str(rng.randrange(MAX_PREFIXES)))
        for _ in range(_DECISIONS)
    ]

    def beat() -> None:
        for report in reports:
            fleet.heartbeat(report)

    beat()
    views = [prefixes.annotate(fleet.view(), case.prefix_key) for case in cases]

    def look() -> None:
        for case in cases:
            prefixes.annotate(fleet.view(), case.prefix_key)

    def choose() -> None:
        for case, view in zip(cases, views, strict=True):
            decide(case, view, rng, first_only=True)

    def all_of_it() -> None:
        for case in cases:
            view = prefixes.annotate(fleet.view(), case.prefix_key)
            for candidate in decide(case, view, rng, first_only=True).candidates:
                if (lease := fleet.acquire(candidate)) is not None:
                    fleet.release(lease, AttemptResult.SUCCEEDED)
                    break
            else:
                raise SystemExit("There is always room: what was timed is not what is told.")

    looks, choices, wholes = (_timed(work, beat) for work in (look, choose, all_of_it))
    return Cost(min(looks) + min(choices), median(looks) + median(choices), min(wholes))


def _timed(work: Callable[[], None], beat: Callable[[], None]) -> list[float]:
    """Return the microseconds of each decision, of every run; workers beat between two runs."""
    runs_us = []
    for _ in range(_RUNS):
        beat()
        begun_s = time.process_time()
        work()
        runs_us.append((time.process_time() - begun_s) / _DECISIONS * 1e6)
    return runs_us


def main() -> None:
    rows, reached_us = [], 0.0
    for workers in _WORKERS:
        for kind, profile in _KINDS:
            cost = measure(workers, profile)
            rows.append((f"{workers}, {kind}", *(f"{figure:.1f}" for figure in cost)))
            if workers == _WORKERS[-1]:
                reached_us = max(reached_us, cost.decision_us)
    grid = Grid(
        title=f"CPU microseconds of a decision, {MAX_PREFIXES:,} system prompts known",
        columns=(
            "workers, request",
            "decision, least",
            "... median",
            "with slot and change, least",
        ),
        rows=tuple(rows),
    )
    met = "met" if reached_us <= PROMISED_US else "NOT met"
    promise = f"Promised: at most {PROMISED_US:.0f} us with {_WORKERS[-1]} workers; {met}."
    Console(highlight=False, width=100).print(grid.drawn())
    print(promise)
    RESULTS.write_text(f"{_ABOUT}\n{grid.markdown()}\n{promise}\n")


if __name__ == "__main__":
    main()
