"""Scores of the lanes of a pool for one request, in seconds; the least is best."""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p
from typing import NamedTuple, Protocol, TypeVar

from gateway.routing.view import CachedPrefix, CachedPrefixes, LaneGroup, LaneView
from paceline.request.profile import RequestProfile
from policies.sections import Pool

# A cached system prompt lowers a worker's cost only while its load (1 is a full lane) is at most
# this much above the best other worker's: a prompt that all requests share would overload one
# machine. A conversation has one next turn, so its cost alone decides how long it waits for its
# worker. `bench.fleet.sim` measures which value is good.
_MAX_LOAD_LEAD = 0.625

# This share of requests goes to a worker without an answer for so long, if there is one: only
# answers show that a worker works, and how fast.
_EXPLORED_SHARE = 0.01
_UNPROVEN_AFTER_S = 30.0
_CHARS_PER_TOKEN = 4
_TOKENS_PER_IMAGE = 300
# Scale of the random term by which idle workers are chosen by weight: below any measured cost.
_TIE_BREAK_S = 1e-9

Item = TypeVar("Item")


class Chance(Protocol):
    """Random choices; `random.Random` makes them."""

    def random(self) -> float:
        """Return a number of [0, 1)."""

    def choice(self, items: Sequence[Item], /) -> Item:
        """Return one of the items."""


class ScoredLane(NamedTuple):
    """One lane with its cost for a request."""

    lane: LaneView
    score_s: float = 0.0
    """Cost of the request there, by weight."""
    prefill_s: float = 0.0
    """The prefill of the tokens that the worker has not cached."""
    cached: CachedPrefix | None = None
    """The part of the prompt that the worker has cached."""
    explored: bool = False
    """First because its worker has not answered for a while, not because it costs least."""


def rank(
    group: LaneGroup,
    pool: Pool,
    profile: RequestProfile,
    cached: CachedPrefixes,
    *,
    now_s: float,
    rng: Chance,
    explore: bool,
    first_only: bool,
) -> list[ScoredLane]:
    """Return the lanes of a pool, best first, or only the best if that is enough."""
    lanes = group.lanes
    if first_only and len(lanes) == 1:
        only = lanes[0]
        return [ScoredLane(only, cached=cached.get((only.worker_id, only.boot_id)))]
    tokens = _prompt_tokens(profile, cached)
    scores_s = _scores_s(lanes, pool, tokens, now_s, rng)
    first = scores_s.index(min(scores_s))
    saved = _saved(group, lanes[first].load, cached) if cached else {}
    for index, (_, saved_s) in saved.items():
        scores_s[index] -= saved_s
        if scores_s[index] < scores_s[first]:
            first = index
    least_s = scores_s[first]
    if scores_s.count(least_s) > 1:
        first = rng.choice([at for at, score_s in enumerate(scores_s) if score_s == least_s])
    explored = None
    # A conversation would be read again elsewhere, which takes far longer than other requests.
    explore = explore and (first not in saved or saved[first][0].is_system)
    if explore and len(lanes) > 1 and rng.random() < _EXPLORED_SHARE:
        explored = _unproven(lanes, now_s, rng)
        first = first if explored is None else explored
    order = [first]
    if not (first_only and lanes[first].capable):
        ranked = sorted([(score_s, rng.random(), at) for at, score_s in enumerate(scores_s)])
        order += [at for _, _, at in ranked if at != first]
    scored = []
    for at in order:
        found, saved_s = saved.get(at, (None, 0.0))
        prefill_s = tokens * lanes[at].prefill_token_s - saved_s
        scored.append(ScoredLane(lanes[at], scores_s[at], prefill_s, found, at == explored))
    return scored


def _prompt_tokens(profile: RequestProfile, cached: CachedPrefixes) -> float:
    """Return the estimated tokens of a prompt, at least the cached ones."""
    tokens = profile.text_chars / _CHARS_PER_TOKEN
    if profile.media:
        tokens += profile.media_count * _TOKENS_PER_IMAGE
    return max([tokens, *[found.tokens for found in cached.values()]]) if cached else tokens


def _scores_s(
    lanes: Sequence[LaneView], pool: Pool, tokens: float, now_s: float, rng: Chance
) -> list[float]:
    """Return the cost of the request at each lane, by weight, with its whole prefill."""
    if pool.weights:
        return [_weighted_s(lane, pool.weight(lane.labels), tokens, now_s, rng) for lane in lanes]
    return [
        lane.load_cost_s + tokens * lane.prefill_token_s
        if lane.prefill_until_s <= now_s
        else lane.load_cost_s + tokens * lane.prefill_token_s + lane.prefill_until_s - now_s
        for lane in lanes
    ]


def _weighted_s(lane: LaneView, weight: float, tokens: float, now_s: float, rng: Chance) -> float:
    """Return a score that gives a worker of twice the weight twice the load."""
    wait_s = max(lane.prefill_until_s - now_s, 0.0)
    # Idle workers get requests by weight too: of exponentially distributed numbers, a worker's is
    # the least as often as its weight says.
    tie_break_s = -log1p(-rng.random()) * _TIE_BREAK_S
    return (lane.load_cost_s + wait_s + tie_break_s) / weight + tokens * lane.prefill_token_s


def _saved(
    group: LaneGroup, best_load: float, cached: CachedPrefixes
) -> dict[int, tuple[CachedPrefix, float]]:
    """Return the cached parts of the prompt by worker, and the prefill time that each saves.

    A full worker saves nothing, since waiting there is no gain; nor does a worker with only the
    system prompt that is much busier than the best.
    """
    lanes, positions, _ = group
    worker_ids = [worker_id for worker_id, _ in cached]
    if positions is None:
        indexes = [at for at, lane in enumerate(lanes) if lane.worker_id in worker_ids]
    else:
        indexes = [positions[worker_id] for worker_id in worker_ids if worker_id in positions]
    saved = {}
    for index in indexes:
        lane = lanes[index]
        found = cached.get((lane.worker_id, lane.boot_id))
        if found is None:
            continue
        near = not found.is_system or lane.load <= best_load + _MAX_LOAD_LEAD
        worthwhile = near and lane.has_free_slot
        saved[index] = found, found.tokens * lane.prefill_token_s if worthwhile else 0.0
    return saved


def _unproven(lanes: Sequence[LaneView], now_s: float, rng: Chance) -> int | None:
    """Choose a lane with a free slot whose worker has not answered for a while, if there is one."""
    unproven = [
        index
        for index, lane in enumerate(lanes)
        if lane.answered_at_s + _UNPROVEN_AFTER_S < now_s and lane.has_free_slot
    ]
    return rng.choice(unproven) if unproven else None
