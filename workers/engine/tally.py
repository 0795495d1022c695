"""Draft and verify counts of one answer, step by step."""

from __future__ import annotations

from workers.engine.types import DraftStep
from workers.protocol import Speculation


class SpeculationTally:
    """Draft and verify counts of one row, step by step."""

    def __init__(self, draft_tokens: int) -> None:
        self._draft_tokens = draft_tokens
        self._histogram = [0] * (draft_tokens + 1)
        self._steps: list[DraftStep] = []
        self._drafted = 0
        self._accepted = 0
        self._errors = 0

    @property
    def steps(self) -> tuple[DraftStep, ...]:
        """Name the verifies of this row's drafts, in order."""
        return tuple(self._steps)

    @property
    def step_count(self) -> int:
        """Count them, in no time."""
        return len(self._steps)

    def step(self, drafted: int, accepted: int) -> None:
        """Count one verify of this row's draft."""
        self._steps.append(DraftStep(drafted=drafted, accepted=accepted))
        self._drafted += drafted
        self._accepted += accepted
        self._histogram[accepted] += 1

    def fail(self, drafted: int) -> None:
        """Count draft tokens that were wanted and never came."""
        self._drafted += drafted
        self._errors += drafted

    def total(self) -> Speculation:
        """Return the counts so far."""
        if not self._draft_tokens:
            return Speculation()
        return Speculation(
            num_spec_tokens=self._draft_tokens,
            steps=len(self._steps),
            drafted=self._drafted,
            accepted=self._accepted,
            errors=self._errors,
            histogram=tuple(self._histogram),
        )
