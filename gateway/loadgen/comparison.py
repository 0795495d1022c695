"""Two endpoints beside each other, pure: ratios of neighbouring turns, and their medians."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from gateway.loadgen.load import Level
from gateway.loadgen.runner import Measurement

SHOWN: Final = (
    ("Output tokens/s", "output_throughput"),
    ("Requests/s", "request_throughput"),
    ("TTFT p50, ms", "median_ttft_ms"),
    ("TTFT p99, ms", "p99_ttft_ms"),
    ("TPOT p50, ms", "median_tpot_ms"),
    ("TPOT p99, ms", "p99_tpot_ms"),
    ("ITL p50, ms", "median_itl_ms"),
    ("ITL p99, ms", "p99_itl_ms"),
    ("Accepted, %", "spec_decode_acceptance_rate"),
    ("Tokens a step", "spec_decode_acceptance_length"),
)
"""What is put beside each other: the title, and the name in the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure of A over the same of B."""

    level: Level
    title: str
    name: str
    a: float
    b: float
    """Medians over the repetitions."""
    ratio: float
    """The median of the ratios of neighbouring turns."""
    lowest: float
    highest: float

    def as_json(self) -> dict[str, Any]:
        """Render for the record."""
        numbers = ("a", "b", "ratio", "lowest", "highest")
        return {"load": self.level.name, "figure": self.name} | {
            name: getattr(self, name) for name in numbers
        }


def compare(measurements: Sequence[Measurement]) -> tuple[Ratio, ...]:
    """Compare A and B at each level; a figure that either lacks is left out."""
    return tuple(
        ratio
        for level in dict.fromkeys(measured.level for measured in measurements)
        for title, name in SHOWN
        if (ratio := _ratio(measurements, level, title, name)) is not None
    )


def medians(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """Return the median of each figure over repetitions; a list is taken place by place."""
    told = [measured.figures.as_json() for measured in measurements]
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each[name] for each in told if name in each]
        if all(isinstance(value, list) for value in values):
            found[name] = [median(places) for places in zip(*values, strict=False)]
        elif all(isinstance(value, int | float) for value in values):
            found[name] = median(values)
    return found


def _ratio(
    measurements: Sequence[Measurement], level: Level, title: str, name: str
) -> Ratio | None:
    pairs = [
        (a[name], b[name])
        for a, b in _turns(measurements, level)
        if a.get(name) is not None and b.get(name)
    ]
    if not pairs:
        return None
    ratios = [a / b for a, b in pairs]
    return Ratio(
        level=level,
        title=title,
        name=name,
        a=median(a for a, _ in pairs),
        b=median(b for _, b in pairs),
        ratio=median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
    )


def _turns(
    measurements: Sequence[Measurement], level: Level
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Pair the figures of A and B of the same repetition."""
    by_turn = {
        (measured.endpoint, measured.repetition): measured.figures.as_json()
        for measured in measurements
        if measured.level == level
    }
    return [
        (figures, by_turn["B", repetition])
        for (endpoint, repetition), figures in by_turn.items()
        if endpoint == "A" and ("B", repetition) in by_turn
    ]
