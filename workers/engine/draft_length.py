"""Draft length policy: measure each length by batch size, and use the fastest.

A step that drafts k tokens costs more than a plain one and yields 1 to k + 1 tokens. The lane
measures both while it works, and uses the k with the most tokens a second, 0 included, so that it
is never slower than without drafting. (The cost model is that of Leviathan et al. 2023, arXiv
2211.17192, section 3.3, with every quantity measured instead of assumed.) Pure: the caller passes
durations, no clock is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

SAMPLES = 9
"""Durations stored for each batch size and k; their median is the cost."""
MIN_SAMPLES = 3
"""Steps for which each k is tried at a new batch size."""
PROBE_EVERY = 128
"""Steps after which another k is tried again, since contexts grow and machines warm up."""
PROBE_STEPS = 4
"""Consecutive steps of one probe: the first also pays for the head's backlog, so it is no
sample."""
MARGIN = 1.05
"""Factor by which another k must be faster to replace the current one."""
EXPLORATION_STEPS = 4
"""Steps that always draft at the beginning of an answer in a small batch: acceptance depends on the
text, and only drafting measures it. Their cost is no sample, since the server and the client are
busy with the beginning of the answer."""
EXPLORATION_ROWS = 2
FORCED_LENGTHS: tuple[int, ...] = (4, 8)
"""Further lengths of drafts where a grammar forces the tokens; few, as each is compiled."""
DECAY = 0.98
"""Weight of the past against one more verified draft token, in the acceptance of a position."""

_SHORTEST_S = 1e-9
"""A clock may show no time between two steps."""


class DraftLength:
    """Draft length of one lane."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._candidates = range(max_draft_tokens, -1, -1)
        self._acceptance = [0.75] * max_draft_tokens
        """Share of drafts accepted at a position, given that all before it were."""
        self._costs_s: dict[tuple[int, int], deque[float]] = {}
        self._current: dict[int, int] = {}
        self._steps = 0

    def choose(self, rows: int, fewest_steps: int = EXPLORATION_STEPS) -> int:
        """Return the draft length of the next step of a batch of `rows` rows.

        `fewest_steps` is the number of drafted steps of the newest row.
        """
        if self.is_exploring(rows, fewest_steps):
            return self._max_draft_tokens
        size = _size_class(rows)
        self._steps += 1
        untried = [k for k in self._candidates if len(self._samples(size, k)) < MIN_SAMPLES]
        if untried:
            return untried[0]
        if self._steps >= PROBE_EVERY and self._steps % PROBE_EVERY < PROBE_STEPS:
            others = [k for k in self._candidates if k != self._current.get(size)]
            return others[self._steps // PROBE_EVERY % len(others)] if others else 0
        return self._fastest(size)

    def choose_forced(self, rows: int, k: int, runs: Sequence[int]) -> int:
        """Return the length of a draft for rows of which some are forced to go on, at least k.

        `runs` is the number of forced tokens of each row. Forced tokens cost no pass of the head,
        and are accepted, so a longer draft pays wherever its verify costs less than its tokens.
        """
        lengths = [
            length
            for length in (self._max_draft_tokens, *FORCED_LENGTHS)
            if k < length <= max(runs, default=0)
        ]
        size = _size_class(rows)
        for length in lengths:
            if len(self._samples(size, length)) < MIN_SAMPLES:
                return length
        if not self._samples(size, k):
            return max(lengths, default=k)
        free = self.tokens_per_step(k)

        def speed(length: int) -> float:
            tokens = sum(min(run, length) + 1 if run else free for run in runs)
            return tokens / (median(self._samples(size, length)) or _SHORTEST_S)

        return max((k, *lengths), key=speed)

    def is_exploring(self, rows: int, fewest_steps: int) -> bool:
        """Return whether the next step drafts only to measure the acceptance of a new answer."""
        return rows <= EXPLORATION_ROWS and fewest_steps < EXPLORATION_STEPS

    def observe_cost(self, rows: int, k: int, duration_s: float) -> None:
        """Record the duration of a step that drafted k tokens."""
        self._samples(_size_class(rows), k).append(duration_s)

    def observe_acceptance(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of one row's draft were accepted."""
        for position in range(min(drafted, accepted + 1, self._max_draft_tokens)):
            hit = position < accepted
            self._acceptance[position] = DECAY * self._acceptance[position] + (1 - DECAY) * hit

    def best(self, rows: int) -> int:
        """Return the best k for a batch of `rows` rows; the maximum while it is not measured."""
        return self._current.get(_size_class(rows), self._max_draft_tokens)

    def plain_step_s(self, rows: int) -> float | None:
        """Return the cost of a step without drafts; None while it is not measured."""
        samples = self._costs_s.get((_size_class(rows), 0))
        return median(samples) if samples else None

    def tokens_per_step(self, k: int) -> float:
        """Return the expected tokens of a step that drafts k."""
        tokens, reached = 1.0, 1.0
        for share in self._acceptance[:k]:
            reached *= share
            tokens += reached
        return tokens

    def _fastest(self, size: int) -> int:
        speed = {
            k: self.tokens_per_step(k) / median(self._samples(size, k)) for k in self._candidates
        }
        fastest = max(speed, key=lambda k: speed[k])
        current = self._current.setdefault(size, self._max_draft_tokens)
        if speed[fastest] > MARGIN * speed[current]:
            self._current[size] = current = fastest
        return current

    def _samples(self, size: int, k: int) -> deque[float]:
        return self._costs_s.setdefault((size, k), deque(maxlen=SAMPLES))


def _size_class(rows: int) -> int:
    """Return a class of batch sizes of similar cost: 1 to 8 apart, then 9-16, 17-32 and so on."""
    return rows if rows <= 8 else 1 << (rows - 1).bit_length()
