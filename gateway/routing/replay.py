"""The last decided requests, replayed to show which ones another policy would move.

Only the bounded properties that policies read are stored, and no text.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable

from gateway.routing.score import Chance
from gateway.routing.select import RoutingRequest, decide
from gateway.routing.view import FleetView
from gateway.types import NOWHERE
from policies.document import PolicyDocument

MAX_RECENT_REQUESTS = 10_000
# A handful takes a millisecond or two: so long the requests of others wait at most.
_AT_A_TIME = 25

PoolMoves = Counter[tuple[str, str]]
"""Number of requests by their pool under the old and under the new policy."""


class RecentRequests:
    """The last 10,000 decided requests."""

    def __init__(self) -> None:
        self._requests: deque[RoutingRequest] = deque(maxlen=MAX_RECENT_REQUESTS)

    def add(self, request: RoutingRequest) -> None:
        """Add a request in place of the oldest one."""
        # Without the keys: what is cached changes the worker and not the pool.
        policy, profile, attributes, allowed_pools, _ = request
        if profile.stop or profile.sampling.logit_bias:
            # No policy reads the long fields. With one bias the profile fits the same lanes.
            sampling = profile.sampling._replace(logit_bias=profile.sampling.logit_bias[:1])
            profile = profile._replace(stop=(), sampling=sampling)
        self._requests.append(RoutingRequest(policy, profile, attributes, allowed_pools))

    async def count_moves(
        self,
        old: PolicyDocument,
        new: PolicyDocument,
        fleet: FleetView,
        *,
        now_s: float,
        rng: Chance,
        pause: Callable[[], Awaitable[None]],
    ) -> PoolMoves:
        """Count the requests by their pool under each policy, with this fleet.

        `pause` lets other requests run; it is awaited before each 25 requests. The actual pools are
        not compared, since full lanes and lost workers have affected them. Each request is decided
        by the profile that the policy of its time produced.
        """

        def pool(policy: PolicyDocument, request: RoutingRequest) -> str:
            decision = decide(request._replace(policy=policy), fleet, now_s, rng, first_only=True)
            return decision.candidates[0].pool if decision.candidates else NOWHERE

        moves = PoolMoves()
        for number, request in enumerate(tuple(self._requests)):
            if number % _AT_A_TIME == 0:
                await pause()
            moves[pool(old, request), pool(new, request)] += 1
        return moves
