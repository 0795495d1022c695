"""How many tokens to draft: measured, by batch size, so that a lane is never slower than plain.

A round that drafts k tokens costs more than a plain one and brings 1 to k + 1 tokens. Both are
measured while the lane works; the k of the most tokens a second is used, 0 included. (The cost
model is that of Leviathan et al. 2023, arXiv 2211.17192, section 3.3, with every quantity taken
from the machine instead of assumed.) Pure: durations come in, no clock is read.
"""

from __future__ import annotations

from collections import deque
from statistics import median

SAMPLES = 9
"""Durations remembered for each batch size and k; their median is the cost."""
MIN_SAMPLES = 3
"""Rounds each k is tried for at a batch size that is new."""
PROBE_EVERY = 128
"""Rounds after which one other k is tried again, as contexts grow and machines warm up."""
PROBE_STEPS = 4
"""So many together: the first one behind plain rounds pays for those, and teaches nothing."""
MARGIN = 1.05
"""How much faster another k must be to be worth a change."""
EXPLORATION_STEPS = 4
"""Steps that an answer is drafted for in any case while it is nearly alone: acceptance belongs to
the text, and a text that was never drafted for says nothing. What they cost says nothing either:
the server and the client are busy with the beginning of the answer just then."""
EXPLORATION_ROWS = 2
DECAY = 0.98
"""Weight of the past against one more judged draft token, in the acceptance of a position."""


class DraftLength:
    """Chooses k for one lane."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self._accepted = [0.75] * max_draft_tokens
        """Share of drafts accepted at a position, given that all before it were."""
        self._costs_s: dict[tuple[int, int], deque[float]] = {}
        self._current: dict[int, int] = {}
        self._rounds = 0

    def choose(self, rows: int, fewest_steps: int = EXPLORATION_STEPS) -> int:
        """Return the k for the next round of so many rows, the newest drafted for so many steps."""
        if self.is_exploring(rows, fewest_steps):
            return self._max_draft_tokens
        size = _size_class(rows)
        self._rounds += 1
        untried = [k for k in self._candidates() if len(self._samples(size, k)) < MIN_SAMPLES]
        if untried:
            return untried[0]
        if self._rounds >= PROBE_EVERY and self._rounds % PROBE_EVERY < PROBE_STEPS:
            others = [k for k in self._candidates() if k != self._current.get(size)]
            return others[self._rounds // PROBE_EVERY % len(others)] if others else 0
        return self._best(size)

    def is_exploring(self, rows: int, fewest_steps: int) -> bool:
        """Say whether the next round is drafted for to learn of the text, and not of the costs."""
        return rows <= EXPLORATION_ROWS and fewest_steps < EXPLORATION_STEPS

    def observe_cost(self, rows: int, k: int, duration_s: float) -> None:
        """Learn what a round cost."""
        self._samples(_size_class(rows), k).append(duration_s)

    def observe_acceptance(self, drafted: int, accepted: int) -> None:
        """Learn what became of one row's draft."""
        for position in range(min(drafted, accepted + 1, self._max_draft_tokens)):
            kept = position < accepted
            self._accepted[position] = DECAY * self._accepted[position] + (1 - DECAY) * kept

    def best(self, rows: int) -> int:
        """Return the draft length of the next step of a batch of `rows` rows."""
        return self._current.get(_size_class(rows), self._max_draft_tokens)

    def plain_step_s(self, rows: int) -> float | None:
        """Return what a round without drafts costs so many rows; None while that is not known."""
        samples = self._costs_s.get((_size_class(rows), 0))
        return median(samples) if samples else None

    def tokens_per_step(self, k: int) -> float:
        """Return the expected tokens of a round that drafts k."""
        tokens, reached = 1.0, 1.0
        for share in self._accepted[:k]:
            reached *= share
            tokens += reached
        return tokens

    def _best(self, size: int) -> int:
        speed = {
            k: self.tokens_per_step(k) / median(self._samples(size, k)) for k in self._candidates()
        }
        fastest = max(speed, key=lambda k: speed[k])
        current = self._current.setdefault(size, self._max_draft_tokens)
        if speed[fastest] > MARGIN * speed[current]:
            self._current[size] = current = fastest
        return current

    def _candidates(self) -> range:
        return range(self._max_draft_tokens, -1, -1)

    def _samples(self, size: int, k: int) -> deque[float]:
        return self._costs_s.setdefault((size, k), deque(maxlen=SAMPLES))


def _size_class(rows: int) -> int:
    """Batch sizes that cost about the same: 1 to 8 apart, then 9-16, 17-32 and so on."""
    return rows if rows <= 8 else 1 << (rows - 1).bit_length()
