"""Targets of the speculative lane, and the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.engine.bare import Bare, Round
from bench.engine.measurements import STREAMS
from bench.harness.contenders import OURS, PEERS
from bench.harness.samples import Samples
from bench.harness.tables import Target
from workers.engine.types import EngineSettings

_SETTINGS: Final = EngineSettings(model=Path(), served_name="")
LONGEST_DRAFT: Final = _SETTINGS.draft_tokens


def judge(all_samples: Mapping[str, Samples], bare: Bare) -> list[Target]:
    """Return all targets with their results."""
    ours = all_samples[OURS.name]
    results = [
        *_against_peers(ours, all_samples),
        *_against_plain(ours, bare.rounds),
        *_under_load(ours),
    ]
    contexts = sorted({rollback.context_tokens for rollback in bare.rollbacks})
    if contexts:
        short_s, long_s = (
            median(entry.cost_s for entry in bare.rollbacks if entry.context_tokens == context)
            for context in (contexts[0], contexts[-1])
        )
        results.append(
            _at_most(
                f"rollback after {contexts[-1]} tokens over one after {contexts[0]}",
                long_s / short_s,
                1.5,
            )
        )
    return results


def ceiling(rounds: Sequence[Round], rows: int) -> float | None:
    """Return the maximum gain of drafting: tokens of a round over its relative cost."""
    speeds = {
        k: [
            entry.tokens_per_row / entry.cost_s
            for entry in rounds
            if (entry.rows, entry.k) == (rows, k)
        ]
        for k in range(LONGEST_DRAFT + 1)
    }
    if not all(speeds.values()):
        return None
    return max(median(speed) for speed in speeds.values()) / median(speeds[0])


def _against_peers(ours: Samples, all_samples: Mapping[str, Samples]) -> Iterator[Target]:
    def best(streams: int, *, mtp: tuple[bool, ...]) -> float | None:
        figures = [
            all_samples[peer.name].median(f"tokens_per_s/{streams}")
            for peer in PEERS
            if peer.mtp in mtp and peer.name in all_samples
        ]
        return max((figure for figure in figures if figure), default=None)

    targets: tuple[tuple[int, tuple[bool, ...], float, str], ...] = (
        (1, (False,), 1.5, "the best peer without MTP"),
        (1, (True,), 1.0, "the best peer with MTP"),
        (4, (True, False), 1.1, "the best peer in any mode"),
        (8, (True, False), 1.1, "the best peer in any mode"),
    )
    for streams, mtp, bound, opponent in targets:
        own, best_peer = ours.median(f"tokens_per_s/{streams}"), best(streams, mtp=mtp)
        if own and best_peer:
            yield _at_least(
                f"tokens/s at {_streams(streams)} over {opponent}", own / best_peer, bound
            )


def _against_plain(ours: Samples, rounds: Sequence[Round]) -> Iterator[Target]:
    for streams in STREAMS:
        drafting = ours.median(f"tokens_per_s/{streams}")
        plain = ours.median(f"tokens_per_s/{streams}/k0")
        if not drafting or not plain:
            continue
        yield _at_least(
            f"tokens/s at {_streams(streams)} over its plain lane", drafting / plain, 0.97
        )
        maximum = ceiling(rounds, streams)
        if streams == 1 and maximum:
            yield _at_least("gain at 1 stream over its ceiling", drafting / plain / maximum, 0.9)
    single = ours.median(f"acceptance/1/k{LONGEST_DRAFT}")
    full = ours.median(f"acceptance/{STREAMS[-1]}/k{LONGEST_DRAFT}")
    if single and full:
        yield _at_most(
            f"acceptance at {_streams(STREAMS[-1])} minus that at 1, in points",
            100 * abs(single - full),
            2.0,
        )


def _under_load(ours: Samples) -> Iterator[Target]:
    pairs = (
        ("first token while 4 run over idle, p50", "ttft_live4_s", "ttft_live0_s", 1.3),
        (
            "5 x 256 tokens concurrently over sequentially",
            "burst_concurrent_s",
            "burst_sequential_s",
            1 / 3,
        ),
        ("first token, known 4k system prompt over new", "warm_ttft_s", "cold_ttft_s", 0.1),
    )
    for name, numerator, denominator, bound in pairs:
        above, below = ours.median(numerator), ours.median(denominator)
        if above and below:
            yield _at_most(name, above / below, bound)
    longest, usual = ours.median("longest_gap_s"), ours.median("usual_gap_s")
    if longest and usual:
        yield _at_most(
            "longest gap over two rounds and the budget of a chunk",
            longest / (2 * usual + _SETTINGS.prefill_budget_s),
            1.0,
        )


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def _at_least(name: str, reached: float, bound: float) -> Target:
    return Target(name=name, reached=reached, bound=bound, at_least=True)


def _at_most(name: str, reached: float, bound: float) -> Target:
    return Target(name=name, reached=reached, bound=bound, at_least=False)
