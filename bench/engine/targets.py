"""What the speculative lane has to reach, beside what it did reach."""

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
    """Hold what was measured against every promise that it can judge."""
    ours = all_samples[OURS.name]
    found = [
        *_against_peers(ours, all_samples),
        *_against_itself(ours, bare.rounds),
        *_under_load(ours),
    ]
    contexts = sorted({rollback.context_tokens for rollback in bare.rollbacks})
    if contexts:
        short_s, long_s = (
            median(entry.cost_s for entry in bare.rollbacks if entry.context_tokens == context)
            for context in (contexts[0], contexts[-1])
        )
        found.append(
            _at_most(
                f"rollback behind {contexts[-1]} tokens over one behind {contexts[0]}",
                long_s / short_s,
                1.5,
            )
        )
    return found


def ceiling(rounds: Sequence[Round], rows: int) -> float | None:
    """Return the most that drafting can bring: tokens of a round over its relative cost."""
    speeds = {
        k: [
            entry.tokens_a_row / entry.cost_s
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

    wanted: tuple[tuple[int, tuple[bool, ...], float, str], ...] = (
        (1, (False,), 1.5, "the best peer without MTP"),
        (1, (True,), 1.0, "the best peer with MTP"),
        (4, (True, False), 1.1, "the best peer in any mode"),
        (8, (True, False), 1.1, "the best peer in any mode"),
    )
    for streams, mtp, bound, who in wanted:
        mine, theirs = ours.median(f"tokens_per_s/{streams}"), best(streams, mtp=mtp)
        if mine and theirs:
            yield _at_least(f"tokens/s at {_streams(streams)} over {who}", mine / theirs, bound)


def _against_itself(ours: Samples, rounds: Sequence[Round]) -> Iterator[Target]:
    for streams in STREAMS:
        drafting = ours.median(f"tokens_per_s/{streams}")
        plain = ours.median(f"tokens_per_s/{streams}/k0")
        if not drafting or not plain:
            continue
        yield _at_least(
            f"tokens/s at {_streams(streams)} over its own plain lane", drafting / plain, 0.97
        )
        most = ceiling(rounds, streams)
        if streams == 1 and most:
            yield _at_least("gain at 1 stream over its ceiling", drafting / plain / most, 0.9)
    alone = ours.median(f"acceptance/1/k{LONGEST_DRAFT}")
    crowded = ours.median(f"acceptance/{STREAMS[-1]}/k{LONGEST_DRAFT}")
    if alone and crowded:
        yield _at_most(
            f"acceptance at {_streams(STREAMS[-1])} off that at 1, in points",
            100 * abs(alone - crowded),
            2.0,
        )


def _under_load(ours: Samples) -> Iterator[Target]:
    pairs = (
        ("first token while 4 run over idle, p50", "ttft_live4_s", "ttft_live0_s", 1.3),
        ("5 x 256 tokens at once over in turn", "burst_at_once_s", "burst_in_turn_s", 1 / 3),
        ("first token, known 4k system prompt over new", "warm_ttft_s", "cold_ttft_s", 0.1),
    )
    for promise, numerator, denominator, bound in pairs:
        above, below = ours.median(numerator), ours.median(denominator)
        if above and below:
            yield _at_most(promise, above / below, bound)
    longest, usual = ours.median("longest_gap_s"), ours.median("usual_gap_s")
    if longest and usual:
        yield _at_most(
            "longest gap over two rounds and the budget of a chunk",
            longest / (2 * usual + _SETTINGS.prefill_budget_s),
            1.0,
        )


def _streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def _at_least(promise: str, reached: float, bound: float) -> Target:
    return Target(promise=promise, reached=reached, bound=bound, at_least=True)


def _at_most(promise: str, reached: float, bound: float) -> Target:
    return Target(promise=promise, reached=reached, bound=bound, at_least=False)
