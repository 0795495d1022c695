"""Examples that a Hypothesis strategy draws, for benchmarks; the seed determines them."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

Example = TypeVar("Example")


def drawn(strategy: SearchStrategy[Example], count: int, seed: int) -> list[Example]:
    examples: list[Example] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(example: Example) -> None:
        examples.append(example)

    collect()
    return examples
