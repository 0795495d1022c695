"""Reports of measurements: the block of `vllm bench serve`, tables, and ratios of two endpoints."""

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
"""The figures of a comparison: title, and name in the record."""
_WIDTH: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One figure of A divided by the same figure of B."""

    level: Level
    title: str
    name: str
    a: float
    b: float
    """The medians over the repetitions."""
    ratio: float
    """The median of the ratios of the repetitions."""
    lowest: float
    highest: float

    def to_json(self) -> dict[str, Any]:
        """Return the ratio as JSON."""
        numbers = ("a", "b", "ratio", "lowest", "highest")
        return {"load": self.level.name, "figure": self.name} | {
            name: getattr(self, name) for name in numbers
        }


def block(measured: Measurement) -> str:
    """Return one measurement in the format of `vllm bench serve`."""
    return "\n".join(_lines(measured))


def _lines(measured: Measurement) -> Iterator[str]:
    figures, level = measured.figures, measured.level
    record = figures.to_json()
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
    yield _line("Request throughput (req/s):", record["request_throughput"])
    yield _line("Output token throughput (tok/s):", record["output_throughput"])
    yield _line("Peak output token throughput (tok/s):", figures.peak_output_tokens_s)
    yield _line("Peak concurrent requests:", figures.peak_concurrency)
    yield _line("Total token throughput (tok/s):", record["total_token_throughput"])
    for header, short, spread in (
        ("Time to First Token", "TTFT", figures.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", figures.tpot),
        ("Inter-token Latency", "ITL", figures.itl),
    ):
        yield f"{header:-^{_WIDTH}}"
        yield from _spread(short, spread)
    if figures.drafts is not None:
        yield f"{'Speculative Decoding':-^{_WIDTH}}"
        yield _line("Acceptance rate (%):", record["spec_decode_acceptance_rate"])
        yield _line("Acceptance length:", figures.drafts.acceptance_length)
        yield _line("Drafts:", figures.drafts.steps)
        yield _line("Draft tokens:", figures.drafts.drafted)
        yield _line("Accepted tokens:", figures.drafts.accepted)
        if figures.drafts.per_position:
            yield "Per-position acceptance (%):"
        for position, rate in enumerate(figures.drafts.rate_per_position):
            yield _line(f"  Position {position}:", 100 * rate)
    yield "=" * _WIDTH


def _spread(short: str, spread: Spread | None) -> Iterator[str]:
    for kind in ("Mean", "Median", "P99"):
        value = getattr(spread, kind.lower()) if spread else "-"
        yield _line(f"{kind} {short} (ms):", value)


def _line(label: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}"


def sweep(measurements: Sequence[Measurement]) -> Table:
    """Return a table with a row per level and endpoint, with medians over the repetitions."""
    comparing = len({measured.endpoint for measured in measurements}) > 1
    table = _table(
        *(("",) if comparing else ()),
        "Load",
        *("Req/s", "Tok/s", "TTFT\np50", "\np99", "TPOT\np50", "\np99", "ITL\np50", "\np99"),
        *("Accepted", "Per\nstep", "By\nposition"),
        text=2 if comparing else 1,
    )
    groups: dict[tuple[Any, str], list[Measurement]] = {}
    for measured in measurements:
        groups.setdefault((measured.level, measured.endpoint), []).append(measured)
    for (level, endpoint), group in groups.items():
        record = medians(group)
        table.add_row(
            *((endpoint,) if comparing else ()),
            level.name,
            _number(record, "request_throughput"),
            _number(record, "output_throughput", ".0f"),
            *(
                _number(record, f"{kind}_{name}_ms", ".1f")
                for name in ("ttft", "tpot", "itl")
                for kind in ("median", "p99")
            ),
            _number(record, "spec_decode_acceptance_rate", ".1f", "%"),
            _number(record, "spec_decode_acceptance_length"),
            _positions(record),
        )
    table.caption = "times in ms" + (", medians" if len(measurements) > len(groups) else "")
    return table


def comparison(ratios: Sequence[Ratio]) -> Table:
    """Return a table of ratios, one row per figure."""
    table = _table("Load", "Figure", "A", "B", "A / B", "lowest", "highest", text=2)
    previous = None
    for ratio in ratios:
        name = "" if ratio.level == previous else ratio.level.name
        previous = ratio.level
        numbers = (ratio.a, ratio.b, ratio.ratio, ratio.lowest, ratio.highest)
        table.add_row(name, ratio.title, *(f"{number:.2f}" for number in numbers))
    table.caption = "medians; A / B compares the same repetitions"
    return table


def _table(*columns: str, text: int) -> Table:
    """Return an empty table whose first `text` columns are left-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text else "right", overflow="fold")
    return table


def _number(record: dict[str, Any], name: str, form: str = ".2f", unit: str = "") -> str:
    return f"{record[name]:{form}}{unit}" if name in record else "-"


def _positions(record: dict[str, Any]) -> str:
    rates = record.get("spec_decode_per_position_acceptance_rates", ())
    return " ".join(f"{100 * rate:.0f}%" for rate in rates) or "-"


def compare(measurements: Sequence[Measurement]) -> tuple[Ratio, ...]:
    """Return the ratios at each level, without figures that A or B lacks."""
    return tuple(
        ratio
        for level in dict.fromkeys(measured.level for measured in measurements)
        for title, name in SHOWN
        if (ratio := _ratio(measurements, level, title, name)) is not None
    )


def _ratio(
    measurements: Sequence[Measurement], level: Level, title: str, name: str
) -> Ratio | None:
    pairs = [
        (a[name], b[name])
        for a, b in _pairs(measurements, level)
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


def _pairs(
    measurements: Sequence[Measurement], level: Level
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the figures of A and B of each repetition that both completed."""
    records = {
        (measured.endpoint, measured.repetition): measured.figures.to_json()
        for measured in measurements
        if measured.level == level
    }
    return [
        (record, records["B", repetition])
        for (endpoint, repetition), record in records.items()
        if endpoint == "A" and ("B", repetition) in records
    ]


def medians(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """Return the median of each figure over repetitions; lists element by element."""
    records = [measured.figures.to_json() for measured in measurements]
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        if all(isinstance(value, list) for value in values):
            result[name] = [median(elements) for elements in zip(*values, strict=False)]
        elif all(isinstance(value, int | float) for value in values):
            result[name] = median(values)
    return result
