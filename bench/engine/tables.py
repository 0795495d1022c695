"""Tables and targets of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.engine.measurements import DRAFT_LENGTHS, LIVE_STREAMS, STREAMS
from bench.engine.rounds import Bare, Round
from bench.harness.contenders import OURS, PEERS
from bench.harness.samples import Samples
from bench.harness.tables import MISSING, Grid, Target, cell, ratio
from workers.engine.types import EngineSettings

_SETTINGS: Final = EngineSettings(model=Path(), served_name="")
_LONGEST_DRAFT: Final = _SETTINGS.draft_tokens
_MEDIANS: Final[Mapping[str, tuple[str, float, str]]] = {
    "5 x 256 tokens, concurrently, s": ("burst_concurrent_s", 1, ".2f"),
    "5 x 256 tokens, sequentially, s": ("burst_sequential_s", 1, ".2f"),
    "new 4k system prompt: first token, ms": ("cold_ttft_s", 1e3, ".0f"),
    "cached 4k system prompt: first token, ms": ("warm_ttft_s", 1e3, ".0f"),
    "longest gap while 4k tokens are read, ms": ("longest_gap_s", 1e3, ".0f"),
    "... usual gap, ms": ("usual_gap_s", 1e3, ".1f"),
    "... first token of that prompt, ms": ("long_prompt_ttft_s", 1e3, ".0f"),
    "memory when loaded, MB": ("memory_loaded_bytes", 1e-6, ".0f"),
    "memory after all this, MB": ("memory_used_bytes", 1e-6, ".0f"),
}


def engines(all_samples: Mapping[str, Samples]) -> Grid:
    measured = all_samples.values()

    def line(label: str, make: Callable[[Samples], str]) -> tuple[str, ...]:
        return label, *map(make, measured)

    speeds = [
        (f"tokens/s, {n} at once", *(cell(one.median(f"tokens_per_s/{n}")) for one in measured))
        for n in STREAMS
    ]
    first, *others = [
        (label, *(cell(one.median(name), scale, form) for one in measured))
        for label, (name, scale, form) in _MEDIANS.items()
    ]
    rows = [
        *speeds,
        line("first token, idle: p50 / p99, ms", lambda one: _percentiles(one, 0)),
        line(
            f"first token while {LIVE_STREAMS} run: p50 / p99, ms",
            lambda one: _percentiles(one, LIVE_STREAMS),
        ),
        *(first, others[0]),
        line("drafts accepted, 1 at once / 8", _accepted),
        line("... by position, 1 at once / 8", _positions),
        *others[1:],
    ]
    return Grid("Engines on the same checkpoint, greedy", ("", *all_samples), rows)


def draft_lengths(ours: Samples, rounds: Sequence[Round]) -> Grid:
    """Return the gain of drafting at each batch size, and its ceiling."""
    rows = []
    for n in STREAMS:
        speed, plain = ours.median(f"tokens_per_s/{n}"), ours.median(f"tokens_per_s/{n}/k0")
        rows.append(
            (
                f"{n} at once",
                *(cell(ours.median(f"tokens_per_s/{n}/k{k}")) for k in DRAFT_LENGTHS),
                cell(speed),
                *(_round(rounds, n, k) for k in DRAFT_LENGTHS),
                *(cell(one, 1, ".2f") for one in (_ceiling(rounds, n), ratio(speed, plain))),
            )
        )
    lengths = [f"k={k}" for k in DRAFT_LENGTHS]
    return Grid(
        "Drafting at each batch size: tokens/s over HTTP, ms and tokens of a bare round",
        ("", *lengths, "chosen", *(f"round {one}" for one in lengths), "ceiling", "gain"),
        rows,
    )


def _percentiles(samples: Samples, running: int) -> str:
    name = f"ttft_live{running}_s"
    return " / ".join(cell(samples.percentile(name, share), 1e3) for share in (0.5, 0.99))


def _drafting_suffix(samples: Samples) -> str:
    """Return the suffix of the full draft length: there, every step verifies as many tokens."""
    return f"/k{_LONGEST_DRAFT}" if f"acceptance/1/k{_LONGEST_DRAFT}" in samples.figures else ""


def _accepted(samples: Samples) -> str:
    suffix = _drafting_suffix(samples)
    return " / ".join(cell(samples.median(f"acceptance/{n}{suffix}"), 1, ".1%") for n in (1, 8))


def _positions(samples: Samples) -> str:
    suffix = _drafting_suffix(samples)

    def joined(streams: int) -> str:
        shares = [
            samples.median(f"acceptance/{streams}{suffix}/position{position}")
            for position in range(1, _LONGEST_DRAFT + 1)
        ]
        return ", ".join(f"{share:.2f}" for share in shares if share is not None) or MISSING

    return f"{joined(1)} / {joined(8)}"


def _round(rounds: Sequence[Round], rows: int, k: int) -> str:
    chosen = [entry for entry in rounds if (entry.rows, entry.k) == (rows, k)]
    if not chosen:
        return MISSING
    cost_s = median(entry.cost_s for entry in chosen)
    return f"{1e3 * cost_s:.1f} ms, {median(entry.tokens_per_row for entry in chosen):.2f}"


def _ceiling(rounds: Sequence[Round], rows: int) -> float | None:
    """Return the maximum gain of drafting: tokens of a round over its relative cost."""
    speeds = {
        k: [one.tokens_per_row / one.cost_s for one in rounds if (one.rows, one.k) == (rows, k)]
        for k in range(_LONGEST_DRAFT + 1)
    }
    if not all(speeds.values()):
        return None
    return max(median(speed) for speed in speeds.values()) / median(speeds[0])


def judge(all_samples: Mapping[str, Samples], bare: Bare) -> list[Target]:
    ours = all_samples[OURS.name]
    judged = [*_speeds(ours, all_samples, bare.rounds), *_under_load(ours)]
    costs: dict[int, list[float]] = {}
    for one in bare.rollbacks:
        costs.setdefault(one.context_tokens, []).append(one.cost_s)
    if costs:
        short, long = min(costs), max(costs)
        name = f"rollback after {long} tokens over one after {short}"
        judged.append(Target(name, median(costs[long]) / median(costs[short]), 1.5))
    return judged


def _speeds(
    ours: Samples, all_samples: Mapping[str, Samples], rounds: Sequence[Round]
) -> Iterator[Target]:
    for streams, modes, bound, opponent in (
        (1, (False,), 1.5, "the best peer without MTP"),
        (1, (True,), 1.0, "the best peer with MTP"),
        (4, (True, False), 1.1, "the best peer in any mode"),
        (8, (True, False), 1.1, "the best peer in any mode"),
    ):
        name = f"tokens_per_s/{streams}"
        peers = [one.name for one in PEERS if one.mtp in modes and one.name in all_samples]
        best = max((all_samples[peer].median(name) or 0.0 for peer in peers), default=0.0)
        if (over := ratio(ours.median(name), best)) is not None:
            yield Target(f"tokens/s at {_streams(streams)} over {opponent}", over, bound, True)
    for streams in STREAMS:
        name = f"tokens_per_s/{streams}"
        gain = ratio(ours.median(name), ours.median(f"{name}/k0"))
        if gain is not None:
            yield Target(f"tokens/s at {_streams(streams)} over its plain lane", gain, 0.97, True)
            if streams == 1 and (maximum := _ceiling(rounds, streams)):
                yield Target("gain at 1 stream over its ceiling", gain / maximum, 0.9, True)
    single, full = (ours.median(f"acceptance/{n}/k{_LONGEST_DRAFT}") for n in (1, STREAMS[-1]))
    if single and full:
        name = f"acceptance at {_streams(STREAMS[-1])} minus that at 1, in points"
        yield Target(name, 100 * abs(single - full), 2.0)


def _under_load(ours: Samples) -> Iterator[Target]:
    for name, above, below, bound in (
        ("first token while 4 run over idle, p50", "ttft_live4_s", "ttft_live0_s", 1.3),
        ("5 x 256 tokens concurrently over sequentially",
         "burst_concurrent_s", "burst_sequential_s", 1 / 3),
        ("first token, known 4k system prompt over new", "warm_ttft_s", "cold_ttft_s", 0.1),
    ):  # fmt: skip
        if (over := ratio(ours.median(above), ours.median(below))) is not None:
            yield Target(name, over, bound)
    longest, usual = ours.median("longest_gap_s"), ours.median("usual_gap_s")
    if longest and usual:
        over = longest / (2 * usual + _SETTINGS.prefill_budget_s)
        yield Target("longest gap over two rounds and the budget of a chunk", over, 1.0)


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"
