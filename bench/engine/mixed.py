"""The speed of rows of both lanes at once, beside as many rows of one kind.

`python -m bench.engine.mixed` writes `bench/results/mixed.md`. Greedy rows decode in the
speculative lane and sampled ones in the other, in one process without HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from importlib.metadata import version
from statistics import harmonic_mean, median
from typing import Final

from rich.progress import track

from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, report
from paceline.request.profile import Sampling
from tests.support.engine_lane import GREEDY, lanes_of, row_for
from workers.demo import CHECKPOINT
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import LaneName

_HALVES: Final = (1, 2, 4)
"""Rows of each kind."""
_DRAFT_TOKENS: Final = 2
_TOKENS: Final = 1200
_TURNS: Final = 7
_ENDLESS: Final = 1 << 20
_SAMPLED: Final = Sampling(temperature=0.8, top_p=0.9)


def tokens_per_s(checkpoint: Checkpoint, greedy: int, sampled: int) -> tuple[float, float]:
    """Return the tokens per second of such rows, and the share of steps ahead."""
    prompts = PromptRenderer(checkpoint.processor)
    lanes = lanes_of(checkpoint, prompts, *LaneName, draft_tokens=_DRAFT_TOKENS)
    rows = []
    for number in range(greedy + sampled):
        lane, sampling = (lanes[0], GREEDY) if number < greedy else (lanes[1], _SAMPLED)
        prompt = PreparedPrompt(tokens=tuple(20 + (at * 7 + number) % 900 for at in range(24)))
        row = row_for(
            lane, prompts, prompt, _DRAFT_TOKENS, _ENDLESS,
            sampling=sampling, ends=frozenset(), draft_tokens_fixed=False,
        )  # fmt: skip
        rows.append(row)
        lane.add(row)

    def decode() -> float:
        """Decode so many further tokens; return the seconds."""
        begun_s, wanted = time.perf_counter(), sum(len(row.answer) for row in rows) + _TOKENS
        while sum(len(row.answer) for row in rows) < wanted:
            for lane in lanes:
                if lane.busy:
                    lane.step()
        return time.perf_counter() - begun_s

    decode()  # the lanes measure which drafts pay
    before = [lane.counters.report() for lane in lanes]
    seconds = decode()
    after = [lane.counters.report() for lane in lanes]
    steps = sum(one.steps for one in after) - sum(one.steps for one in before)
    ahead = sum(one.steps_ahead for one in after) - sum(one.steps_ahead for one in before)
    return _TOKENS / seconds, ahead / steps


def lines(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    """Measure mixes and what they consist of, in turns."""
    for half in track(_HALVES, description="Measuring"):
        kinds = (2 * half, 0), (0, 2 * half), (half, half)
        turns = [[tokens_per_s(checkpoint, *kind) for kind in kinds] for _ in range(_TURNS)]
        speeds = [median(turn[at][0] for turn in turns) for at in range(len(kinds))]
        ratio = median(turn[2][0] / harmonic_mean([turn[0][0], turn[1][0]]) for turn in turns)
        ahead = median(turn[2][1] for turn in turns)
        cells = *(f"{speed:.0f}" for speed in speeds), f"{ratio:.2f}", f"{ahead:.2f}"
        yield f"{half} and {half}", *cells


def main() -> None:
    logging.disable()
    columns = ("greedy and sampled", "all greedy", "all sampled", "mixed", "ratio", "steps ahead")
    about = (
        f"{provenance()}, MLX {version('mlx')}; medians of {_TURNS} turns of {_TOKENS} tokens each."
        " Ratio: of the mix to the harmonic mean of as many rows of each kind. A step is ahead if "
        "the device has another one to compute while the host reads it."
    )
    table = [*lines(load_checkpoint(CHECKPOINT))]
    grid = Grid("Tokens per second of rows in both lanes", columns, table)
    report("mixed.md", "Rows of both lanes at once", about, grid)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.mixed")
    main()
