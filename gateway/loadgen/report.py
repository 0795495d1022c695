"""What is shown: the block that `vllm bench serve` prints, and tables of several measurements.

Two endpoints beside each other, pure: ratios of neighbouring turns, and their medians.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rich.table import Table

from gateway.loadgen.runner import Level, Measurement
from gateway.loadgen.stats import Spread

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


_WIDTH: Final = 50


def block(measured: Measurement) -> str:
    """Draw one measurement with the words and the columns of `vllm bench serve`."""
    return "\n".join(_lines(measured))


def _lines(measured: Measurement) -> Iterator[str]:
    figures, level = measured.figures, measured.level
    told = figures.as_json()
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
    if level.concurrency is not None:
        yield _line("Maximum request concurrency:", level.concurrency)
    if level.rate is not None:
        yield _line("Request rate configured (RPS):", level.rate)
    yield _line("Benchmark duration (s):", figures.duration_s)
    yield _line("Total input tokens:", figures.input_tokens)
    yield _line("Total generated tokens:", figures.output_tokens)
    yield _line("Request throughput (req/s):", told["request_throughput"])
    yield _line("Output token throughput (tok/s):", told["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", figures.peak_output_tokens_s)
    yield _line("Peak concurrent requests:", figures.peak_concurrency)
    yield _line("Total token throughput (tok/s):", told["total_token_throughput"])
    for header, short, spread in (
        ("Time to First Token", "TTFT", figures.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", figures.tpot),
        ("Inter-token Latency", "ITL", figures.itl),
    ):
        yield f"{header:-^{_WIDTH}}"
        yield from _spread(short, spread)
    if figures.drafts is not None:
        yield f"{'Speculative Decoding':-^{_WIDTH}}"
        yield _line("Acceptance rate (%):", told["spec_decode_acceptance_rate"])
        yield _line("Acceptance length:", figures.drafts.acceptance_length)
        yield _line("Drafts:", figures.drafts.steps)
        yield _line("Draft tokens:", figures.drafts.drafted)
        yield _line("Accepted tokens:", figures.drafts.accepted)
        if figures.drafts.per_position:
            yield "Per-position acceptance (%):"
        for place, rate in enumerate(figures.drafts.rate_per_position):
            yield _line(f"  Position {place}:", 100 * rate)
    yield "=" * _WIDTH


def _spread(short: str, spread: Spread | None) -> Iterator[str]:
    for kind in ("Mean", "Median", "P99"):
        value = getattr(spread, kind.lower()) if spread else "-"
        yield _line(f"{kind} {short} (ms):", value)


def _line(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def sweep(measurements: Sequence[Measurement]) -> Table:
    """Draw a line for each level and endpoint; over several repetitions, the medians."""
    several = len({measured.endpoint for measured in measurements}) > 1
    table = _table(
        *(("",) if several else ()),
        "Load",
        *("Req/s", "Tok/s", "TTFT\np50", "\np99", "TPOT\np50", "\np99", "ITL\np50", "\np99"),
        *("Accepted", "Per\nstep", "By\nposition"),
        text=2 if several else 1,
    )
    groups: dict[tuple[Any, str], list[Measurement]] = {}
    for measured in measurements:
        groups.setdefault((measured.level, measured.endpoint), []).append(measured)
    for (level, endpoint), group in groups.items():
        told = medians(group)
        table.add_row(
            *((endpoint,) if several else ()),
            level.name,
            _number(told, "request_throughput"),
            _number(told, "output_throughput", ".0f"),
            *(
                _number(told, f"{kind}_{name}_ms", ".1f")
                for name in ("ttft", "tpot", "itl")
                for kind in ("median", "p99")
            ),
            _number(told, "spec_decode_acceptance_rate", ".1f", "%"),
            _number(told, "spec_decode_acceptance_length"),
            _positions(told),
        )
    table.caption = "times in ms" + (", medians" if len(measurements) > len(groups) else "")
    return table


def comparison(ratios: Sequence[Ratio]) -> Table:
    """Draw what A is over B, figure by figure."""
    table = _table("Load", "Figure", "A", "B", "A / B", "lowest", "highest", text=2)
    before = None
    for ratio in ratios:
        name = "" if ratio.level == before else ratio.level.name
        before = ratio.level
        numbers = (ratio.a, ratio.b, ratio.ratio, ratio.lowest, ratio.highest)
        table.add_row(name, ratio.title, *(f"{number:.2f}" for number in numbers))
    table.caption = "medians; ratios are those of neighbouring turns"
    return table


def _table(*columns: str, text: int) -> Table:
    """Begin a table whose first `text` columns hold words, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < text else "right", overflow="fold")
    return table


def _number(told: dict[str, Any], name: str, form: str = ".2f", unit: str = "") -> str:
    return f"{told[name]:{form}}{unit}" if name in told else "-"


def _positions(told: dict[str, Any]) -> str:
    rates = told.get("spec_decode_per_position_acceptance_rates", ())
    return " ".join(f"{100 * rate:.0f}%" for rate in rates) or "-"
