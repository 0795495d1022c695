"""Draft policy: measure each source and length of drafts by batch size, and use the fastest.

A step that drafts k tokens costs more than a plain one and yields 1 to k + 1 tokens. The lane
measures both while it works, and uses the k with the most tokens a second, 0 included, so that it
is never slower than without drafting. (The cost model is that of Leviathan et al. 2023, arXiv
2211.17192, section 3.3, with every quantity measured instead of assumed.) A cost that is not
measured yet is estimated from one that is, so that a new batch size begins with a good plan.

How many tokens the head promises is known row by row: a poem and a table in one batch accept
different shares. Beside the head, a row may have a run: tokens that its grammar forces or that
prompt lookup found, which cost no pass of the head and may be longer. A row drafts its run where
that promises more tokens than the head; a step in which all rows do so skips the passes of the
head. Pure: the caller passes durations, no clock is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SAMPLES = 9
"""Durations stored for each batch size and k; their median is the cost."""
MIN_SAMPLES = 3
"""Durations after which a cost is known."""
PROBE_EVERY = 128
"""Steps after which another k is tried again, since contexts grow and machines warm up."""
PROBE_STEPS = 4
"""Consecutive steps of one probe: the first also pays for the head's backlog, so it is no
sample."""
TRY_EVERY = 16
"""Steps from one try of a length of the head, or of none, to the next while a cost is not known."""
MEASURE_EVERY = 32
"""Steps after which one is measured again, where the device also computes other batches."""
MARGIN = 1.05
"""Another k replaces the current one, and a run the head, only if it is faster by this factor."""
EXPLORATION_STEPS = 4
"""Steps that always draft at the beginning of an answer in a small batch: acceptance depends on the
text, and only drafting measures it. Their cost is no sample, since the server and the client are
busy with the beginning of the answer."""
EXPLORATION_ROWS = 2
RUN_LENGTHS: tuple[int, ...] = (4, 8)
"""Further lengths of drafts that are runs; few, as each is compiled."""
_DECAY = 0.98
"""Weight of the past against one more verified draft token, in a lane's share of a position."""
_ROW_DECAY = 0.9
_FIRST_SHARE = 0.75
_FORGOTTEN = 0.005
_ROW_FORGOTTEN = 0.05
"""Parts that a step without the head forgets: an answer may go on otherwise than it began."""
_LANE_WEIGHT = 4.0
"""Drafts of a row that weigh as much as the measurements of its lane."""
_ROW_COST, _TOKEN_COST, _HEAD_COST = 0.05, 0.06, 0.1
"""Parts of the cost of a step that a row, a verified token of a row, and a pass of the head are
assumed to add, until they are measured."""

_SHORTEST_S = 1e-9
"""A clock may show no time between two steps."""

Accepted = list[tuple[float, float]]
"""Drafts of the head for one row, by position: those accepted, and those verified."""


class Run(NamedTuple):
    """Tokens that a row may draft without the head."""

    tokens: Sequence[int]
    forced: int
    """The first of them, which the grammar forces, so that they are accepted."""
    share: float = 1.0
    """Probability that each other one is accepted, given that all before it were."""

    def expected_tokens(self, length: int) -> float:
        """Return the expected tokens of a step that drafts up to `length` of them."""
        tokens, reached = 1.0, 1.0
        for at in range(min(length, len(self.tokens))):
            reached *= 1.0 if at < self.forced else self.share
            tokens += reached
        return tokens


class Plan(NamedTuple):
    """The drafts of one step of a batch."""

    head_tokens: int
    """Tokens that the head drafts for the rows without a run."""
    run_tokens: int = 0
    """Tokens of a run that are verified."""
    uses_run: Sequence[bool] = ()
    """For each row whether it drafts its run."""

    @property
    def cost(self) -> tuple[int, int]:
        """Return how many tokens the head drafts, and how many the target verifies."""
        return self.head_tokens, max(self.head_tokens, self.run_tokens)


class DraftLength:
    """Draft length of one engine."""

    def __init__(
        self,
        max_draft_tokens: int,
        run_lengths: Sequence[int] = RUN_LENGTHS,
        *,
        has_head: bool = True,
    ) -> None:
        """Create the policy of an engine whose runs may also have one of these lengths."""
        self._max_draft_tokens = max_draft_tokens
        self._run_lengths = run_lengths
        self._has_head = has_head
        self._acceptance = [_FIRST_SHARE] * max_draft_tokens
        """Share of drafts accepted at a position, given that all before it were."""
        self._costs_s: dict[tuple[int, int, int], deque[float]] = {}
        """By size class, tokens that the head drafts, and tokens that are verified."""
        self._current: dict[int, int] = {}
        self._steps = 0
        self._planned = 0
        self._unmeasured = 0
        """Steps since the last measurement."""

    def choose(self, rows: Sequence[Accepted], fewest_steps: int = EXPLORATION_STEPS) -> int:
        """Return the draft length of the next step of a batch.

        `rows` are the records of its rows, and `fewest_steps` is the number of drafted steps of the
        newest.
        """
        if self.is_exploring(len(rows), fewest_steps):
            return self._max_draft_tokens
        size = _size_class(len(rows))
        current = self._current.setdefault(size, self._max_draft_tokens)
        self._steps += 1
        lengths = range(self._max_draft_tokens, -1, -1)
        if _is_probe(self._steps, TRY_EVERY):
            for k in (self._max_draft_tokens, *reversed(lengths)):  # the longest, then none
                if not self._is_known(size, k, k):
                    return k
        if _is_probe(self._steps, PROBE_EVERY):
            others = [k for k in lengths if k != current]
            return others[self._steps // PROBE_EVERY % len(others)] if others else 0
        promised = [self.promised_tokens(row) for row in rows]
        speed = {k: sum(row[k] for row in promised) / self._cost_s(size, k, k) for k in lengths}
        fastest = max(speed, key=lambda k: speed[k])
        if speed[fastest] > MARGIN * speed[current]:
            self._current[size] = current = fastest
        return current

    def plan(self, k: int, runs: Sequence[Run | None], rows: Sequence[Accepted]) -> Plan:
        """Return the drafts of a batch, given k for the head (0 without one), and each row's run.

        `rows` are the records of its rows.
        """
        base = Plan(k, 0, (False,) * len(runs))
        longest = max((len(run.tokens) for run in runs if run), default=0)
        lengths = [
            length
            for length in dict.fromkeys((self._max_draft_tokens, *self._run_lengths))
            if 0 < length <= longest
        ]
        if not lengths:
            return base
        size, promised = _size_class(len(runs)), [self.promised_tokens(row) for row in rows]
        self._planned += 1
        if k == 0 and _is_probe(self._planned, TRY_EVERY) and not self._is_known(size, 0, 0):
            return base
        plans = [(base, sum(row[k] for row in promised))]
        for length in lengths:
            gains = [run.expected_tokens(length) if run else 0.0 for run in runs]
            for head_tokens in dict.fromkeys((k, 0)):  # the other rows may draft nothing
                others = [row[head_tokens] for row in promised]
                uses = tuple(gain > other for gain, other in zip(gains, others, strict=True))
                if any(uses):
                    plan = Plan(0 if all(uses) else head_tokens, length, uses)
                    plans.append((plan, sum(map(max, gains, others))))
                if all(uses):
                    break
        if _is_probe(self._planned, PROBE_EVERY):
            return plans[self._planned // PROBE_EVERY % len(plans)][0]
        speeds = [tokens / self._cost_s(size, *plan.cost) for plan, tokens in plans]
        fastest = max(speeds)
        return plans[speeds.index(fastest)][0] if fastest > MARGIN * speeds[0] else base

    def is_exploring(self, rows: int, fewest_steps: int) -> bool:
        """Return whether the next step drafts only to measure the acceptance of a new answer."""
        return rows <= EXPLORATION_ROWS and fewest_steps < EXPLORATION_STEPS

    def observe_cost(
        self, rows: int, k: int, duration_s: float, *, head_tokens: int | None = None
    ) -> None:
        """Record the duration of a step that drafted k tokens, all of them by the head if None."""
        self._unmeasured = 0
        key = (_size_class(rows), k if head_tokens is None else head_tokens, k)
        self._costs_s.setdefault(key, deque(maxlen=SAMPLES)).append(max(duration_s, _SHORTEST_S))

    def observe_acceptance(self, drafted: int, accepted: int, of_row: Accepted) -> None:
        """Record how many tokens of one row's draft were accepted, in its own record too."""
        of_row += [(0.0, 0.0)] * (self._max_draft_tokens - len(of_row))
        for position in range(min(drafted, accepted + 1, self._max_draft_tokens)):
            hit = position < accepted
            self._acceptance[position] = _DECAY * self._acceptance[position] + (1 - _DECAY) * hit
            hits, verified = of_row[position]
            of_row[position] = _ROW_DECAY * hits + hit, _ROW_DECAY * verified + 1

    def forget(self, rows: Sequence[Accepted]) -> None:
        """Forget a part of the acceptance of a lane, and of the rows of a step without the head."""
        for position, share in enumerate(self._acceptance):
            self._acceptance[position] += _FORGOTTEN * (_FIRST_SHARE - share)
        for of_row in rows:
            of_row[:] = [
                (hits * (1 - _ROW_FORGOTTEN), verified * (1 - _ROW_FORGOTTEN))
                for hits, verified in of_row
            ]

    def promised_tokens(self, of_row: Sequence[tuple[float, float]] = ()) -> list[float]:
        """Return the expected tokens of steps in which the head drafts 0, 1, ... for a row."""
        promised, reached = [1.0], 1.0
        for position, share in enumerate(self._acceptance):
            hits, verified = of_row[position] if of_row else (0.0, 0.0)
            reached *= (_LANE_WEIGHT * share + hits) / (_LANE_WEIGHT + verified)
            promised.append(promised[-1] + reached)
        return promised

    def best(self, rows: int) -> int:
        """Return the best k for a batch of `rows` rows; the maximum while it is not measured.

        Without a head it is 0 once no run would pay even if all of its tokens were accepted.
        """
        size = _size_class(rows)
        if self._has_head:
            return self._current.get(size, self._max_draft_tokens)
        plain = self._costs_s.get((size, 0, 0))
        lengths = (self._max_draft_tokens, *self._run_lengths)
        costs = [(length, self._costs_s.get((size, 0, length))) for length in lengths]
        pays = not plain or any(
            not samples or (length + 1) * median(plain) > median(samples)
            for length, samples in costs
        )
        return self._max_draft_tokens if pays else 0

    def speedup(self, rows: int) -> float:
        """Return the tokens per second with the head's best drafts relative to none.

        0 while a batch of this size is not measured, and without a head: the gain of prompt lookup
        is that of a text, and not of a machine.
        """
        size = _size_class(rows)
        k, plain_s = self._current.get(size), self.cost_s(rows, 0, 0)
        if k is None or plain_s is None or not self._has_head:
            return 0.0
        return self.promised_tokens()[k] * plain_s / self._cost_s(size, k, k)

    def cost_s(self, rows: int, head_tokens: int, verified: int) -> float | None:
        """Return the cost of such a step; None while it is not measured."""
        samples = self._costs_s.get((_size_class(rows), head_tokens, verified))
        return median(samples) if samples else None

    def wants_sample(self, rows: int, plan: Plan) -> bool:
        """Return whether the next step is to be measured, though that holds up other batches."""
        unknown = not self._is_known(_size_class(rows), *plan.cost)
        return unknown or self._unmeasured >= MEASURE_EVERY

    def skip_cost(self) -> None:
        """Record a step whose cost could not be measured."""
        self._unmeasured += 1

    def _is_known(self, size: int, head_tokens: int, verified: int) -> bool:
        return len(self._costs_s.get((size, head_tokens, verified), ())) >= MIN_SAMPLES

    def _cost_s(self, size: int, head_tokens: int, verified: int) -> float:
        """Return the cost of a step: as measured, or estimated from the nearest measured one."""
        samples = self._costs_s.get((size, head_tokens, verified))
        if samples:
            return median(samples)
        nearest = min(
            self._costs_s,
            key=lambda key: (
                abs(key[0] - size),
                abs(key[1] - head_tokens) + abs(key[2] - verified),
            ),
            default=None,
        )
        assumed = _assumed_cost(size, head_tokens, verified)
        if nearest is None:
            return assumed
        return median(self._costs_s[nearest]) * assumed / _assumed_cost(*nearest)


def _is_probe(step: int, every: int) -> bool:
    return step >= every and step % every < PROBE_STEPS


def _assumed_cost(size: int, head_tokens: int, verified: int) -> float:
    """Return an assumption on the cost of a step, in no unit: only ratios of it are used."""
    return 1 + size * (_ROW_COST + _TOKEN_COST * verified) + _HEAD_COST * head_tokens


def _size_class(rows: int) -> int:
    """Return a class of batch sizes of similar cost: 1 to 8 apart, then 9-16, 17-32 and so on."""
    return rows if rows <= 8 else 1 << (rows - 1).bit_length()
