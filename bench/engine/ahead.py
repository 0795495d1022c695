"""The speed of rounds that begin before the host has read the last one, and of those that wait.

`python -m bench.engine.ahead` writes `bench/results/ahead.md`. Two lanes of one process decode in
turns, without HTTP and without other requests: the lane of a worker, and one whose rounds wait.
The second model is that of the demo with 32 random layers, whose rounds have many more operations
to describe. A CPU computes on the cores that the host needs, so a GPU gains more.

A second table has rows of both lanes at once: greedy ones in the speculative lane, sampled ones in
the other, and beside them what the same number of rows of each kind makes alone.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from statistics import harmonic_mean, median
from typing import Final

import mlx.core as mx
from rich.progress import track

from bench.families.checkpoints import build
from bench.harness.blas import restart_with_fast_blas
from bench.harness.lane import greedy_row, lane_of, lanes_of
from bench.harness.tables import Grid, provenance, report
from paceline.request.profile import Sampling
from workers.demo import CHECKPOINT
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.target import Target
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer

ROWS: Final = (1, 4, 8)
LAYERS: Final = 32
_DRAFT_TOKENS: Final = 2
_ROUNDS: Final = 40
_TURNS: Final = 9
_WARM_UP_ROUNDS: Final = 8
_PROMPT_TOKENS: Final = 24
_ENDLESS: Final = 1 << 20
_SAMPLED: Final = Sampling(temperature=0.8, top_p=0.9)
_MIXED_TOKENS: Final = 1200
_MIXES: Final = (2, 4)
"""Rows of each kind."""


class WaitingLane(LaneScheduler):
    """A lane in which no round begins before the host has read the one before it."""

    @property
    def begins_ahead(self) -> bool:
        """Return False: then every round waits."""
        return False


class Side:
    """A lane full of rows, and the samples of its speed."""

    def __init__(
        self, kind: type[LaneScheduler], checkpoint: Checkpoint, rows: int, k: int
    ) -> None:
        prompts = PromptRenderer(checkpoint.processor)
        self._lane = lane_of(checkpoint, prompts, k, kind=kind)
        self._rows = []
        for number in range(rows):
            tokens = tuple(20 + (at * 7 + number) % 900 for at in range(_PROMPT_TOKENS))
            row = greedy_row(prompts, PreparedPrompt(tokens=tokens), k, _ENDLESS)
            self._rows.append(row)
            self._lane.add(row)
        while self._lane.running_rows < rows:
            self._lane.step()
        for _ in range(_WARM_UP_ROUNDS):
            self._lane.step()
        self.tokens_per_s: list[float] = []
        self.cpu_ms_a_round: list[float] = []

    def decode(self, rounds: int) -> None:
        before = sum(len(row.answer) for row in self._rows)
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(rounds):
            self._lane.step()
        elapsed_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        tokens = sum(len(row.answer) for row in self._rows) - before
        self.tokens_per_s.append(tokens / elapsed_s)
        self.cpu_ms_a_round.append(1000 * cpu_s / rounds)


def compare(before: Side, after: Side, *, rounds: int, turns: int) -> tuple[str, ...]:
    """Let two lanes decode in turns; return the cells of both and the median of their ratios.

    What slows one turn slows both its lanes.
    """
    sides = before, after
    for turn in range(turns + 1):
        for side in sides if turn % 2 else sides[::-1]:
            side.decode(rounds)
    ratios = [
        now / then
        for then, now in zip(before.tokens_per_s[1:], after.tokens_per_s[1:], strict=True)
    ]  # the first turn warms up
    return (
        *(f"{median(side.tokens_per_s[1:]):.0f}" for side in sides),
        f"{median(ratios):.2f}",
        *(f"{median(side.cpu_ms_a_round[1:]):.1f}" for side in sides),
    )


def mixed_tokens_per_s(checkpoint: Checkpoint, greedy: int, sampled: int) -> tuple[float, float]:
    """Let rows of both lanes decode; return their tokens a second, and the share of steps ahead."""
    prompts = PromptRenderer(checkpoint.processor)
    lanes = lanes_of(checkpoint, prompts, _DRAFT_TOKENS)
    kinds = [(lanes[0], Sampling(temperature=0))] * greedy + [(lanes[1], _SAMPLED)] * sampled
    rows = []
    for number, (lane, sampling) in enumerate(kinds):
        prompt = PreparedPrompt(tokens=tuple(20 + (at * 7 + number) % 900 for at in range(24)))
        row = greedy_row(
            prompts, prompt, _DRAFT_TOKENS, _ENDLESS,
            lane=lane.name, sampling=sampling, fixed=False, with_head=True,
        )  # fmt: skip
        rows.append(row)
        lane.add(row)

    def decode(tokens: int) -> float:
        """Decode until the rows have so many further tokens; return the seconds."""
        begun_s, wanted = time.perf_counter(), sum(len(row.answer) for row in rows) + tokens
        while sum(len(row.answer) for row in rows) < wanted:
            for lane in lanes:
                if lane.busy:
                    lane.step()
        return time.perf_counter() - begun_s

    decode(_MIXED_TOKENS)
    before = [lane.counters.report() for lane in lanes]
    seconds = decode(_MIXED_TOKENS)
    counts = [lane.counters.report() for lane in lanes]
    steps = sum(one.steps for one in counts) - sum(one.steps for one in before)
    ahead = sum(one.steps_ahead for one in counts) - sum(one.steps_ahead for one in before)
    return _MIXED_TOKENS / seconds, ahead / steps


def mixed_lines(checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    """Measure mixes and what they consist of, in turns."""
    for half in track(_MIXES, description="Mixing"):
        kinds = (2 * half, 0), (0, 2 * half), (half, half)
        turns = [[mixed_tokens_per_s(checkpoint, *kind) for kind in kinds] for _ in range(_TURNS)]
        speeds = [median(turn[at][0] for turn in turns) for at in range(3)]
        ratio = median(turn[2][0] / harmonic_mean([turn[0][0], turn[1][0]]) for turn in turns)
        ahead = median(turn[2][1] for turn in turns)
        cells = *(f"{speed:.0f}" for speed in speeds), f"{ratio:.2f}", f"{ahead:.2f}"
        yield f"{half} and {half}", *cells


def deep_model(demo: Checkpoint) -> Checkpoint:
    """Return the demo's configuration with random weights and more layers, without a head."""
    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    kinds = text["layer_types"]
    text["layer_types"] = [kinds[at % len(kinds)] for at in range(LAYERS)]
    text["num_hidden_layers"] = LAYERS
    text.pop("mtp_num_hidden_layers", None)
    mx.random.seed(0)
    model = build(config)
    mx.eval(model.parameters())
    model.eval()
    return replace(demo, target=Target(model), head=None)


def main() -> None:
    logging.disable()
    demo = load_checkpoint(CHECKPOINT)
    deep = deep_model(demo)
    cases = [
        *(("demo", demo, rows, k) for k in (0, _DRAFT_TOKENS) for rows in ROWS),
        *((f"{LAYERS} layers", deep, rows, 0) for rows in ROWS),
    ]
    lines = []
    for name, checkpoint, rows, k in track(cases, description="Measuring"):
        sides = (Side(kind, checkpoint, rows, k) for kind in (WaitingLane, LaneScheduler))
        lines.append((f"{name}, {rows}, {k}", *compare(*sides, rounds=_ROUNDS, turns=_TURNS)))
    columns = ("model, rows, drafts", "waiting", "ahead", "ratio", "CPU a round, ms", "ahead")
    about = (
        f"{provenance()}, MLX {version('mlx')}; medians of {_TURNS} turns of {_ROUNDS} rounds each."
        " Rounds begin before the host has read the last one (ahead), or wait for that. Ratio: "
        "median of the ratios of the turns; of mixed rows, to the harmonic mean of what as many "
        "rows of one kind make. A step is ahead if the device has another one to compute while the "
        "host reads it."
    )
    grid = Grid("Tokens per second of bare rounds", columns, lines)
    columns = ("greedy and sampled", "all greedy", "all sampled", "mixed", "ratio", "steps ahead")
    mixed = Grid("Tokens per second of rows in both lanes", columns, [*mixed_lines(demo)])
    report("ahead.md", "Rounds that do not wait for the host", about, grid, mixed)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.ahead")
    main()
