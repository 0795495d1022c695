"""Cost of the policy per request, by its number of routes: `python -m bench.gateway.policy`.

Random policies have conditions of all kinds, and so do the requests. A run measures the complete
match of a request against a policy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Any, Final

from bench.harness.tables import Grid, show
from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.compiler import CallerAttributes
from policies.document import PolicyDocument, default_policy, read_policy
from policies.evaluate import match_route
from policies.routes import DAYS, MINUTES_OF_WEEK

ROUTES: Final = (10, 50, 200)
TARGET_ROUTES: Final = 50
TARGET_US: Final = 20.0
_REQUESTS: Final = 500
_RUNS: Final = 40
_HEADERS: Final = ("x-app", "x-tier")

Requests = Sequence[tuple[RequestProfile, CallerAttributes]]


def random_policy(routes: int, rng: Random) -> PolicyDocument:
    """Return a policy of random routes; only the last one matches every request."""
    conditional = [
        {"name": f"route-{number}", "when": _condition(rng), "to": "vlm"}
        for number in range(routes - 1)
    ]
    document = {
        "version": 1,
        "routes": [*conditional, {"name": "rest", "to": "vlm"}],
        "pools": {"vlm": {"lanes": "vlm"}},
    }
    return read_policy(document, "benchmark")


def measure(policy: PolicyDocument, requests: Requests) -> list[float]:
    """Return the microseconds of a match, of several runs over all requests."""
    runs_us = []
    for _ in range(_RUNS):
        begun_s = time.perf_counter()
        for profile, attributes in requests:
            match_route(policy, profile, attributes)
        runs_us.append((time.perf_counter() - begun_s) / len(requests) * 1e6)
    return runs_us


def random_requests(rng: Random) -> Requests:
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
        for _ in range(_REQUESTS)
    ]


def _condition(rng: Random) -> dict[str, Any]:
    conditions: dict[str, Any] = {
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
    return {name: conditions[name] for name in rng.sample([*conditions], 4)}


def main() -> None:
    rng = Random(1)
    requests = random_requests(rng)
    policies = [("default", default_policy())]
    policies += [("random", random_policy(routes, rng)) for routes in ROUTES]
    rows, reached_us = [], 0.0
    for name, policy in policies:
        runs_us = measure(policy, requests)
        least_us, routes = min(runs_us), len(policy.routes)
        if routes == TARGET_ROUTES:
            reached_us = least_us
        cells = f"{least_us:.1f}", f"{median(runs_us):.1f}"
        rows.append((name, routes, len(policy.compiled.readers), *cells))
    columns = ("policy", "routes", "properties read", "us, minimum", "us, median")
    met = "met" if reached_us <= TARGET_US else "NOT met"
    show(
        Grid("Cost of the policy per request", columns, rows),
        f"Target: at most {TARGET_US:.0f} us for {TARGET_ROUTES} routes; {met}.",
    )


if __name__ == "__main__":
    main()
