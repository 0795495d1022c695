"""Tables of the engines, for a terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from bench.engine.bare import Round
from bench.engine.measurements import LIVE_STREAMS, STREAMS
from bench.engine.session import DRAFT_LENGTHS
from bench.engine.targets import LONGEST_DRAFT, ceiling
from bench.harness.samples import Samples
from bench.harness.tables import MISSING, Grid

Cell = Callable[[Samples], str]


def engines(all_samples: Mapping[str, Samples]) -> Grid:
    """Compare all contenders, with one line per metric."""
    lines: list[tuple[str, Cell]] = [
        *((f"tokens/s, {n} at once", _median(f"tokens_per_s/{n}", 1, ".0f")) for n in STREAMS),
        ("first token, idle: p50 / p99, ms", _percentiles("ttft_live0_s")),
        (
            f"first token while {LIVE_STREAMS} run: p50 / p99, ms",
            _percentiles(f"ttft_live{LIVE_STREAMS}_s"),
        ),
        ("5 x 256 tokens, concurrently, s", _median("burst_concurrent_s", 1, ".2f")),
        ("5 x 256 tokens, sequentially, s", _median("burst_sequential_s", 1, ".2f")),
        ("drafts accepted, 1 at once / 8", _accepted),
        ("... by position, 1 at once / 8", _positions),
        ("new 4k system prompt: first token, ms", _median("cold_ttft_s", 1e3, ".0f")),
        ("cached 4k system prompt: first token, ms", _median("warm_ttft_s", 1e3, ".0f")),
        ("longest gap while 4k tokens are read, ms", _median("longest_gap_s", 1e3, ".0f")),
        ("... usual gap, ms", _median("usual_gap_s", 1e3, ".1f")),
        ("... first token of that prompt, ms", _median("long_prompt_ttft_s", 1e3, ".0f")),
        ("memory when loaded, MB", _median("memory_loaded_bytes", 1e-6, ".0f")),
        ("memory after all this, MB", _median("memory_used_bytes", 1e-6, ".0f")),
    ]
    return Grid(
        title="Engines on the same checkpoint, greedy",
        columns=("", *all_samples),
        rows=tuple(
            (label, *(cell(samples) for samples in all_samples.values())) for label, cell in lines
        ),
    )


def draft_lengths(ours: Samples, rounds: Sequence[Round]) -> Grid:
    """Return the gain of drafting at each batch size, and its ceiling."""
    rows: list[tuple[str, ...]] = []
    for streams in STREAMS:
        maximum = ceiling(rounds, streams)
        rows.append(
            (
                f"{streams} at once",
                *(_median(f"tokens_per_s/{streams}/k{k}", 1, ".0f")(ours) for k in DRAFT_LENGTHS),
                _median(f"tokens_per_s/{streams}", 1, ".0f")(ours),
                *(_round(rounds, streams, k) for k in DRAFT_LENGTHS),
                f"{maximum:.2f}" if maximum else MISSING,
                _ratio(ours, f"tokens_per_s/{streams}", f"tokens_per_s/{streams}/k0"),
            )
        )
    return Grid(
        title="Drafting at each batch size: tokens/s over HTTP, ms and tokens of a bare round",
        columns=(
            "",
            *(f"k={k}" for k in DRAFT_LENGTHS),
            "chosen",
            *(f"round k={k}" for k in DRAFT_LENGTHS),
            "ceiling",
            "gain",
        ),
        rows=tuple(rows),
    )


def failures(all_samples: Mapping[str, Samples]) -> list[str]:
    """List the metrics that could not be measured, with the reason."""
    return [
        f"{name}, {metric}: {reason}"
        for name, samples in all_samples.items()
        for metric, reason in samples.failures.items()
    ]


def _median(name: str, scale: float, form: str) -> Cell:
    def cell(samples: Samples) -> str:
        value = samples.median(name)
        return MISSING if value is None else format(value * scale, form)

    return cell


def _pair(first: str, second: str, scale: float, form: str) -> Cell:
    cells = _median(first, scale, form), _median(second, scale, form)
    return lambda samples: " / ".join(cell(samples) for cell in cells)


def _percentiles(name: str) -> Cell:
    def cell(samples: Samples) -> str:
        values = [samples.percentile(name, share) for share in (0.5, 0.99)]
        return " / ".join(MISSING if value is None else f"{1e3 * value:.0f}" for value in values)

    return cell


def _drafting_suffix(samples: Samples) -> str:
    """Return the suffix of the full draft length: there, every step verifies as many tokens."""
    return f"/k{LONGEST_DRAFT}" if f"acceptance/1/k{LONGEST_DRAFT}" in samples.figures else ""


def _accepted(samples: Samples) -> str:
    suffix = _drafting_suffix(samples)
    return _pair(f"acceptance/1{suffix}", f"acceptance/8{suffix}", 1, ".1%")(samples)


def _positions(samples: Samples) -> str:
    suffix = _drafting_suffix(samples)

    def joined(streams: int) -> str:
        shares = [
            samples.median(f"acceptance/{streams}{suffix}/position{position}")
            for position in range(1, LONGEST_DRAFT + 1)
        ]
        return ", ".join(f"{share:.2f}" for share in shares if share is not None) or MISSING

    return f"{joined(1)} / {joined(8)}"


def _round(rounds: Sequence[Round], rows: int, k: int) -> str:
    chosen = [entry for entry in rounds if (entry.rows, entry.k) == (rows, k)]
    if not chosen:
        return MISSING
    cost_s = median(entry.cost_s for entry in chosen)
    return f"{1e3 * cost_s:.1f} ms, {median(entry.tokens_per_row for entry in chosen):.2f}"


def _ratio(samples: Samples, above: str, below: str) -> str:
    values = samples.median(above), samples.median(below)
    return f"{values[0] / values[1]:.2f}" if values[0] and values[1] else MISSING
