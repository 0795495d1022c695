"""The last requests as the policy saw them, to say of another policy what it would have moved.

No text is kept: of a request only what policies decide by, and that in a bounded size.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gateway.routing.select import RoutingRequest, decide
from gateway.routing.view import FleetView
from gateway.types import NOWHERE
from policies.document import PolicyDocument

if TYPE_CHECKING:
    from random import Random

MAX_RECENT_REQUESTS = 10_000
# A handful takes a millisecond or two: so long the requests of others wait at most.
_AT_A_TIME = 25

PoolMoves = Counter[tuple[str, str]]
"""How many requests go to which pool now, and to which they would."""


class RecentRequests:
    """The last 10,000 requests that were decided."""

    def __init__(self) -> None:
        self._cases: deque[RoutingRequest] = deque(maxlen=MAX_RECENT_REQUESTS)

    def add(self, case: RoutingRequest) -> None:
        """Keep a case in place of the oldest one."""
        profile = case.profile
        if profile.stop or profile.sampling.logit_bias:
            case = _without_lists(case)
        self._cases.append(case)

    async def count_moves(
        self,
        old: PolicyDocument,
        new: PolicyDocument,
        fleet: FleetView,
        *,
        rng: Random,
        pause: Callable[[], Awaitable[None]],
    ) -> PoolMoves:
        """Count where they would go by the one and by the other policy, with this fleet.

        `pause` lets other requests run; it is awaited before each 25 requests.

        Not where they went: that is also the work of full lanes and of workers that are gone. Each
        is taken as it was read when it came: under the names, defaults, limits and headers of the
        policy that was in force then.
        """
        moves = PoolMoves()
        for number, case in enumerate(tuple(self._cases)):
            if number % _AT_A_TIME == 0:
                await pause()
            moves[_pool(old, case, fleet, rng), _pool(new, case, fleet, rng)] += 1
        return moves


def _pool(policy: PolicyDocument, case: RoutingRequest, fleet: FleetView, rng: Random) -> str:
    decision = decide(case._replace(policy=policy), fleet, rng, first_only=True)
    return decision.candidates[0].pool if decision.candidates else NOWHERE


def _without_lists(case: RoutingRequest) -> RoutingRequest:
    """Let go of what is long: the words to stop at are text, and no policy looks at any of it.

    One bias stands for all: with it the profile is eligible for the same.
    """
    sampling = case.profile.sampling
    sampling = sampling._replace(logit_bias=sampling.logit_bias[:1])
    return case._replace(profile=case.profile._replace(stop=(), sampling=sampling))
