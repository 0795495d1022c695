"""Counts of drafts: from the answers themselves, or from a server's counters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from prometheus_client.parser import text_string_to_metric_families

_PREFIX: Final = "vllm:spec_decode_num_"
_COUNTERS: Final = {
    f"{_PREFIX}drafts_total": "steps",
    f"{_PREFIX}draft_tokens_total": "drafted",
    f"{_PREFIX}accepted_tokens_total": "accepted",
}
_PER_POSITION: Final = f"{_PREFIX}accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Sums over steps; a step is one verify of one request's draft."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    """Without the token that every step brings anyway."""
    per_position: tuple[int, ...] = ()
    """For each draft position, the steps that accepted it."""

    @property
    def acceptance_rate(self) -> float:
        """Return the share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """Return the tokens that a step brought, the certain one included."""
        return 1 + (self.accepted / self.steps if self.steps else 0.0)

    @property
    def rate_per_position(self) -> tuple[float, ...]:
        """Return, for each draft position, the share of steps that accepted it."""
        return tuple(count / self.steps if self.steps else 0.0 for count in self.per_position)

    def __add__(self, other: Drafts) -> Drafts:
        """Add two sums; a position that only one of them has counts as 0 in the other."""
        return self._joined(other, 1)

    def since(self, before: Drafts) -> Drafts:
        """Return the difference from an earlier state of the same counters."""
        return self._joined(before, -1)

    def _joined(self, other: Drafts, sign: int) -> Drafts:
        positions = itertools.zip_longest(self.per_position, other.per_position, fillvalue=0)
        return Drafts(
            steps=self.steps + sign * other.steps,
            drafted=self.drafted + sign * other.drafted,
            accepted=self.accepted + sign * other.accepted,
            per_position=tuple(count + sign * change for count, change in positions),
        )

    @classmethod
    def of_answer(cls, frame: Mapping[str, Any]) -> Self | None:
        """Return the counts of one request, or None.

        Reads the fields of vLLM (and Paceline), mlx-vlm and vllm-mlx.
        """
        match frame:
            case {
                "timings": {
                    "draft_rounds": int(steps),
                    "draft_n": int(drafted),
                    "draft_n_accepted": int(accepted),
                }
            } if drafted:
                return cls(steps=steps, drafted=drafted, accepted=accepted)
            case {
                "generation_metadata": {"mtp_drafts": int(steps), "mtp_accepted": int(accepted)}
            } if steps:
                return cls(steps=steps, drafted=steps, accepted=accepted)
        match frame.get("metrics"):
            case {
                "speculative_decoding": {
                    "num_spec_steps": int(steps),
                    "num_draft_tokens": int(drafted),
                    "num_accepted_draft_tokens": int(accepted),
                    "acceptance_histogram": [*histogram],
                }
            } if all(isinstance(count, int) for count in histogram):
                return cls(
                    steps=steps,
                    drafted=drafted,
                    accepted=accepted,
                    per_position=tuple(sum(histogram[n:]) for n in range(1, len(histogram))),
                )
        return None

    @classmethod
    def of_exposition(cls, text: str) -> Self | None:
        """Sum vLLM's four counters over all lines of a `/metrics`; None where they are missing."""
        sums: Counter[str] = Counter()
        positions: Counter[int] = Counter()
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == _PER_POSITION:
                        positions[int(sample.labels["position"])] += int(sample.value)
                    elif sample.name in _COUNTERS:
                        sums[_COUNTERS[sample.name]] += int(sample.value)
        except (ValueError, KeyError):
            return None
        if len(sums) < len(_COUNTERS):
            return None
        per_position = tuple(positions[n] for n in range(max(positions, default=-1) + 1))
        return cls(per_position=per_position, **sums)
