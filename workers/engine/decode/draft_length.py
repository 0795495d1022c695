"""Draft policy: measure each source and length of drafts by batch size, and use the fastest.

A step that drafts k tokens costs more than a plain one and yields 1 to k + 1 tokens. The lane
measures both while it works, and uses the k with the most tokens a second, 0 included, so that it
is never slower than without drafting. (The cost model is that of Leviathan et al. 2023, arXiv
2211.17192, section 3.3, with every quantity measured instead of assumed.)

Beside the head, a row may have a run: tokens that its grammar forces or that prompt lookup found,
which cost no pass of the head and may be longer. A row drafts its run where that promises more
tokens than the head; a step in which all rows do so skips the passes of the head. Pure: the caller
passes durations, no clock is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SAMPLES = 9
"""Durations stored for each batch size and k; their median is the cost."""
MIN_SAMPLES = 3
"""Steps for which each k is tried at a new batch size."""
PROBE_EVERY = 128
"""Steps after which another k is tried again, since contexts grow and machines warm up."""
PROBE_STEPS = 4
"""Consecutive steps of one probe: the first also pays for the head's backlog, so it is no
sample."""
MEASURE_EVERY = 32
"""Steps after which one is measured again, where the device also computes other batches."""
MARGIN = 1.05
"""Factor by which another k must be faster to replace the current one."""
EXPLORATION_STEPS = 4
"""Steps that always draft at the beginning of an answer in a small batch: acceptance depends on the
text, and only drafting measures it. Their cost is no sample, since the server and the client are
busy with the beginning of the answer."""
EXPLORATION_ROWS = 2
RUN_LENGTHS: tuple[int, ...] = (4, 8)
"""Further lengths of drafts that are runs; few, as each is compiled."""
MIN_RUN_GAIN = 1.1
"""Factor by which a run must promise more tokens than the head for its cost to be measured."""
DECAY = 0.98
"""Weight of the past against one more verified draft token, in the acceptance of a position."""

_SHORTEST_S = 1e-9
"""A clock may show no time between two steps."""


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
    """What one step of a batch drafts."""

    head_tokens: int
    """Tokens that the head drafts for the rows without a run."""
    run_tokens: int = 0
    """Tokens of a run that are verified."""
    uses_run: Sequence[bool] = ()
    """For each row whether it drafts its run."""

    @property
    def cost(self) -> tuple[int, int]:
        """Return the tokens that the head drafts, and those that are verified."""
        return self.head_tokens, max(self.head_tokens, self.run_tokens)


class DraftLength:
    """Draft length of one lane."""

    def __init__(
        self,
        max_draft_tokens: int,
        run_lengths: Sequence[int] = RUN_LENGTHS,
        *,
        has_head: bool = True,
    ) -> None:
        """Create the policy of a lane whose runs may also have one of these lengths."""
        self._max_draft_tokens = max_draft_tokens
        self._run_lengths = run_lengths
        self._has_head = has_head
        self._candidates = range(max_draft_tokens, -1, -1)
        self._acceptance = [0.75] * max_draft_tokens
        """Share of drafts accepted at a position, given that all before it were."""
        self._costs_s: dict[tuple[int, int, int], deque[float]] = {}
        """By size class, tokens that the head drafts, and tokens that are verified."""
        self._current: dict[int, int] = {}
        self._steps = 0
        self._planned = 0
        self._unmeasured = 0
        """Steps since the last one that was measured."""

    def choose(self, rows: int, fewest_steps: int = EXPLORATION_STEPS) -> int:
        """Return the draft length of the next step of a batch of `rows` rows.

        `fewest_steps` is the number of drafted steps of the newest row.
        """
        if self.is_exploring(rows, fewest_steps):
            return self._max_draft_tokens
        size = _size_class(rows)
        self._steps += 1
        untried = [k for k in self._candidates if len(self._samples(size, k, k)) < MIN_SAMPLES]
        if untried:
            return untried[0]
        if self._steps >= PROBE_EVERY and self._steps % PROBE_EVERY < PROBE_STEPS:
            others = [k for k in self._candidates if k != self._current.get(size)]
            return others[self._steps // PROBE_EVERY % len(others)] if others else 0
        return self._fastest(size)

    def plan(self, k: int, runs: Sequence[Run | None]) -> Plan:
        """Return what a batch drafts, given k for the head (0 without one) and each row's run.

        The costs of a plain step, or of one of the head, are measured before runs are drafted that
        may be rejected.
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
        size, free = _size_class(len(runs)), self.tokens_per_step(k)
        plans = [(base, free * len(runs))]
        for length in lengths:
            gains = [run.expected_tokens(length) if run else 0.0 for run in runs]
            for head_tokens in dict.fromkeys((k, 0)):  # the other rows may draft nothing
                other = self.tokens_per_step(head_tokens)
                uses = tuple(gain > other for gain in gains)
                tokens = sum(max(gain, other) for gain in gains)
                if any(uses):
                    plans.append((Plan(0 if all(uses) else head_tokens, length, uses), tokens))
                if all(uses):
                    break
        if len(self._samples(size, *base.cost)) < MIN_SAMPLES:
            certain = max(run.forced for run in runs if run)
            return [plan for plan, _ in plans if plan.run_tokens <= certain][-1]
        for plan, tokens in plans[1:]:
            untried = len(self._samples(size, *plan.cost)) < MIN_SAMPLES
            if untried and tokens > MIN_RUN_GAIN * plans[0][1]:
                return plan
        tried = [each for each in plans if self._samples(size, *each[0].cost)]
        self._planned += 1
        if self._planned % PROBE_EVERY < PROBE_STEPS and self._planned > PROBE_EVERY:
            return tried[self._planned // PROBE_EVERY % len(tried)][0]
        return max(tried, key=lambda each: each[1] / self._cost_s(size, *each[0].cost))[0]

    def is_exploring(self, rows: int, fewest_steps: int) -> bool:
        """Return whether the next step drafts only to measure the acceptance of a new answer."""
        return rows <= EXPLORATION_ROWS and fewest_steps < EXPLORATION_STEPS

    def observe_cost(
        self, rows: int, k: int, duration_s: float, *, head_tokens: int | None = None
    ) -> None:
        """Record the duration of a step that drafted k tokens, all of them by the head if None."""
        self._unmeasured = 0
        self._samples(_size_class(rows), k if head_tokens is None else head_tokens, k).append(
            duration_s
        )

    def observe_acceptance(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of one row's draft were accepted."""
        for position in range(min(drafted, accepted + 1, self._max_draft_tokens)):
            hit = position < accepted
            self._acceptance[position] = DECAY * self._acceptance[position] + (1 - DECAY) * hit

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
        return self.tokens_per_step(k) * plain_s / self._cost_s(size, k, k)

    def cost_s(self, rows: int, head_tokens: int, verified: int) -> float | None:
        """Return the cost of such a step; None while it is not measured."""
        samples = self._costs_s.get((_size_class(rows), head_tokens, verified))
        return median(samples) if samples else None

    def wants_sample(self, rows: int, plan: Plan) -> bool:
        """Return whether the next step is to be measured, though that holds up other batches."""
        few = len(self._samples(_size_class(rows), *plan.cost)) < MIN_SAMPLES
        return few or self._unmeasured >= MEASURE_EVERY

    def skip_cost(self) -> None:
        """Record a step whose cost could not be measured."""
        self._unmeasured += 1

    def tokens_per_step(self, k: int) -> float:
        """Return the expected tokens of a step that drafts k."""
        tokens, reached = 1.0, 1.0
        for share in self._acceptance[:k]:
            reached *= share
            tokens += reached
        return tokens

    def _fastest(self, size: int) -> int:
        speed = {k: self.tokens_per_step(k) / self._cost_s(size, k, k) for k in self._candidates}
        fastest = max(speed, key=lambda k: speed[k])
        current = self._current.setdefault(size, self._max_draft_tokens)
        if speed[fastest] > MARGIN * speed[current]:
            self._current[size] = current = fastest
        return current

    def _cost_s(self, size: int, head_tokens: int, verified: int) -> float:
        return median(self._samples(size, head_tokens, verified)) or _SHORTEST_S

    def _samples(self, size: int, head_tokens: int, verified: int) -> deque[float]:
        return self._costs_s.setdefault((size, head_tokens, verified), deque(maxlen=SAMPLES))


def _size_class(rows: int) -> int:
    """Return a class of batch sizes of similar cost: 1 to 8 apart, then 9-16, 17-32 and so on."""
    return rows if rows <= 8 else 1 << (rows - 1).bit_length()
