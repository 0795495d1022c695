"""What the policy costs a request, by how many routes it has: `python -m bench.gateway.policy`.

Policies are made up, with conditions on everything that a condition can be on; so are the requests.
What is timed is the whole question that a gateway asks of a policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any, Final, NamedTuple

from rich.console import Console

from bench.harness.tables import Grid
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument, default_policy, read_policy
from policies.evaluate import match_route
from policies.request.profile import Endpoint, RequestProfile, Sampling
from policies.routes import DAYS, MINUTES_OF_WEEK

ROUTES: Final = (10, 50, 200)
PROMISED_ROUTES: Final = 50
PROMISED_US: Final = 20.0
_ASKERS: Final = 500
_RUNS: Final = 40
_HEADERS: Final = ("x-app", "x-tier")

Asked = Sequence[tuple[RequestProfile, CallerAttributes]]


class Cost(NamedTuple):
    """Microseconds a request: of the quietest run, and of the middle one."""

    least_us: float
    median_us: float


def made_up(routes: int, rng: Random) -> PolicyDocument:
    """Make a policy of so many routes, none of which takes everything but the last."""
    named = [
        {"name": f"route-{number}", "when": _condition(rng), "to": "vlm"}
        for number in range(routes - 1)
    ]
    document = {
        "version": 1,
        "routes": [*named, {"name": "rest", "to": "vlm"}],
        "pools": {"vlm": {"lanes": "vlm"}},
    }
    return read_policy(document, "the benchmark's")


def measure(policy: PolicyDocument, asked: Asked) -> Cost:
    """Time the policy's answers to all of these requests, again and again."""
    runs_us = []
    for _ in range(_RUNS):
        begun_s = time.perf_counter()
        for profile, attributes in asked:
            match_route(policy, profile, attributes)
        runs_us.append((time.perf_counter() - begun_s) / len(asked) * 1e6)
    return Cost(min(runs_us), median(runs_us))


def requests(rng: Random) -> Asked:
    """Make up requests of all kinds."""
    return [
        (
            RequestProfile(
                endpoint=Endpoint.CHAT,
                model=f"model-{rng.randrange(9)}",
                stream=rng.random() < 0.5,
                media=(("image", 1),) if rng.random() < 0.3 else (),
                sampling=Sampling(temperature=float(rng.randrange(2))),
                max_tokens=rng.choice((None, 64, 1024)),
                tools=rng.random() < 0.3,
                messages=rng.randrange(1, 30),
                text_chars=rng.randrange(50_000),
            ),
            CallerAttributes(
                key=f"key-{rng.randrange(100)}",
                team=f"team-{rng.randrange(20)}",
                headers={name: f"value-{rng.randrange(9)}" for name in _HEADERS},
                minute_of_week=rng.randrange(MINUTES_OF_WEEK),
            ),
        )
        for _ in range(_ASKERS)
    ]


def _condition(rng: Random) -> dict[str, Any]:
    every: dict[str, Any] = {
        "media": rng.choice((True, False, "image", ["video", "audio"])),
        "mtp_eligible": rng.random() < 0.5,
        "greedy": rng.random() < 0.5,
        "stream": rng.random() < 0.5,
        "features": {rng.choice(("tools", "logprobs", "structured_output")): rng.random() < 0.5},
        "prompt_chars": {"at_least": rng.randrange(50_000)},
        "max_tokens": {"at_most": rng.randrange(1, 2048)},
        "messages": {"at_least": rng.randrange(1, 30)},
        "model": [f"model-{rng.randrange(9)}" for _ in range(2)],
        "key": [f"key-{rng.randrange(100)}" for _ in range(5)],
        "team": f"team-{rng.randrange(20)}",
        "header": {rng.choice(_HEADERS): f"value-{rng.randrange(9)}"},
        "hours": f"{rng.randrange(24):02}:00-{rng.randrange(24):02}:30",
        "days": [*rng.sample(DAYS, 2)],
    }
    return {name: every[name] for name in rng.sample([*every], 4)}


def _row(name: str, policy: PolicyDocument, asked: Asked) -> tuple[tuple[str, ...], Cost]:
    cost = measure(policy, asked)
    figures = (str(len(policy.routes)), str(len(policy.compiled.matchers)))
    return (name, *figures, f"{cost.least_us:.1f}", f"{cost.median_us:.1f}"), cost


def main() -> None:
    rng = Random(1)
    asked = requests(rng)
    rows = [_row("as shipped", default_policy(), asked)[0]]
    reached_us = 0.0
    for routes in ROUTES:
        row, cost = _row("made up", made_up(routes, rng), asked)
        rows.append(row)
        if routes == PROMISED_ROUTES:
            reached_us = cost.least_us
    grid = Grid(
        title="What the policy costs a request",
        columns=("policy", "routes", "properties asked", "us, least", "us, median"),
        rows=tuple(rows),
    )
    Console(highlight=False, width=100).print(grid.drawn())
    met = "met" if reached_us <= PROMISED_US else "NOT met"
    print(f"Promised: at most {PROMISED_US:.0f} us for {PROMISED_ROUTES} routes; {met}.")


if __name__ == "__main__":
    main()
