"""Reports of measurements: the block of `vllm bench serve`, tables, and ratios of two endpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final, NamedTuple

from rich.table import Table

from gateway.loadgen.runner import Level, Measurement

POSITIONS: Final = "spec_decode_per_position_acceptance_rates"
_WIDTH: Final = 50
_RESULT: Final = {
    "Successful requests:": "completed",
    "Failed requests:": "failed",
    "Maximum request concurrency:": "max_concurrency",
    "Request rate configured (RPS):": "request_rate",
    "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens",
    "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput",
    "Output token throughput (tok/s):": "output_throughput",
    "Peak output token throughput (tok/s):": "max_output_tokens_per_s",
    "Peak concurrent requests:": "max_concurrent_requests",
    "Total token throughput (tok/s):": "total_token_throughput",
}
_TIMES: Final = {
    "Time to First Token": "TTFT",
    "Time per Output Token (excl. 1st token)": "TPOT",
    "Inter-token Latency": "ITL",
}
_SPECULATION: Final = {
    "Acceptance rate (%):": "spec_decode_acceptance_rate",
    "Acceptance length:": "spec_decode_acceptance_length",
    "Drafts:": "spec_decode_num_drafts",
    "Draft tokens:": "spec_decode_draft_tokens",
    "Accepted tokens:": "spec_decode_accepted_tokens",
}
# The figures of the tables: title in a comparison, heading and format in a sweep.
_FIGURES: Final = {
    "request_throughput": ("Requests/s", "Req/s", "{:.2f}"),
    "output_throughput": ("Output tokens/s", "Tok/s", "{:.0f}"),
    "median_ttft_ms": ("TTFT p50, ms", "TTFT\np50", "{:.1f}"),
    "p99_ttft_ms": ("TTFT p99, ms", "\np99", "{:.1f}"),
    "median_tpot_ms": ("TPOT p50, ms", "TPOT\np50", "{:.1f}"),
    "p99_tpot_ms": ("TPOT p99, ms", "\np99", "{:.1f}"),
    "median_itl_ms": ("ITL p50, ms", "ITL\np50", "{:.1f}"),
    "p99_itl_ms": ("ITL p99, ms", "\np99", "{:.1f}"),
    "spec_decode_acceptance_rate": ("Accepted, %", "Accepted", "{:.1f}%"),
    "spec_decode_acceptance_length": ("Tokens a step", "Per\nstep", "{:.2f}"),
}


class Ratio(NamedTuple):
    """One figure of A divided by the same figure of B."""

    load: str
    figure: str
    a: float
    b: float
    """The medians over the repetitions."""
    ratio: float
    """The median of the ratios of the repetitions."""
    lowest: float
    highest: float


def block(measured: Measurement) -> str:
    """Return one measurement in the format of `vllm bench serve`."""
    record = measured.to_json()
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    lines += [_line(label, record[name]) for label, name in _RESULT.items() if name in record]
    for header, short in _TIMES.items():
        lines.append(f"{header:-^{_WIDTH}}")
        for kind in ("Mean", "Median", "P99"):
            value = record.get(f"{kind}_{short}_ms".lower(), "-")
            lines.append(_line(f"{kind} {short} (ms):", value))
    if POSITIONS in record:
        lines.append(f"{'Speculative Decoding':-^{_WIDTH}}")
        lines += [_line(label, record[name]) for label, name in _SPECULATION.items()]
        if record[POSITIONS]:
            lines.append("Per-position acceptance (%):")
        for position, rate in enumerate(record[POSITIONS]):
            lines.append(_line(f"  Position {position}:", 100 * rate))
    return "\n".join([*lines, "=" * _WIDTH])


def _line(label: str, value: object) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {text:<10}"


def sweep(measurements: Sequence[Measurement]) -> Table:
    """Return a table with a row per level and endpoint, with medians over the repetitions."""
    groups: defaultdict[tuple[Level, str], list[Mapping[str, Any]]] = defaultdict(list)
    for measured in measurements:
        groups[measured.level, measured.endpoint].append(measured.figures)
    comparing = any(endpoint == "B" for _, endpoint in groups)
    leading = ("", "Load") if comparing else ("Load",)
    headings = (heading for _, heading, _ in _FIGURES.values())
    table = _table(*leading, *headings, "By\nposition", text=len(leading))
    for (level, endpoint), records in groups.items():
        figures = medians(records)
        table.add_row(
            *((endpoint,) if comparing else ()),
            level.name,
            *(
                form.format(figures[name]) if name in figures else "-"
                for name, (_, _, form) in _FIGURES.items()
            ),
            " ".join(f"{100 * rate:.0f}%" for rate in figures.get(POSITIONS, ())) or "-",
        )
    table.caption = "times in ms" + (", medians" if len(measurements) > len(groups) else "")
    return table


def comparison(ratios: Sequence[Ratio]) -> Table:
    """Return a table of ratios, one row per figure."""
    table = _table("Load", "Figure", "A", "B", "A / B", "lowest", "highest", text=2)
    previous = ""
    for load, figure, *numbers in ratios:
        title, *_ = _FIGURES[figure]
        table.add_row("" if load == previous else load, title, *map("{:.2f}".format, numbers))
        previous = load
    table.caption = "medians; A / B compares the same repetitions"
    return table


def _table(*columns: str, text: int) -> Table:
    """Return an empty table whose first `text` columns are left-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text else "right", overflow="fold")
    return table


def compare(measurements: Sequence[Measurement]) -> list[Ratio]:
    """Return the ratios at each level over the repetitions that both endpoints completed.

    The result omits a figure that A or B lacks.
    """
    records = {
        (measured.level, measured.repetition, measured.endpoint): measured.figures
        for measured in measurements
    }
    found: list[Ratio] = []
    for level in dict.fromkeys(measured.level for measured in measurements):
        both = [
            (figures, records[level, repetition, "B"])
            for (at, repetition, endpoint), figures in records.items()
            if (at, endpoint) == (level, "A") and (level, repetition, "B") in records
        ]
        for name in _FIGURES:
            pairs = [(a[name], b[name]) for a, b in both if name in a and b.get(name)]
            if ratios := [a / b for a, b in pairs]:
                a, b = map(median, zip(*pairs, strict=True))
                ratio, lowest, highest = median(ratios), min(ratios), max(ratios)
                found.append(Ratio(level.name, name, a, b, ratio, lowest, highest))
    return found


def medians(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over repetitions; lists element by element."""
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        if all(isinstance(value, list) for value in values):
            result[name] = [median(elements) for elements in zip(*values, strict=False)]
        elif all(isinstance(value, int | float) for value in values):
            result[name] = median(values)
    return result
