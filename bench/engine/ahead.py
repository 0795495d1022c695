"""The speed of rounds that begin before the host has read the last one, and of those that wait.

`python -m bench.engine.ahead` writes `bench/results/ahead.md`. Two lanes of one process decode in
turns, without HTTP and without other requests: the lane of a worker, and one whose rounds wait.
The second model is that of the demo with 32 random layers, whose rounds have many more operations
to describe. A CPU computes on the cores that the host needs, so a GPU gains more.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Final

import mlx.core as mx
from rich.progress import track

from bench.families.checkpoints import build
from bench.harness.blas import restart_with_fast_blas
from bench.harness.lane import greedy_row, lane_of
from bench.harness.tables import Grid, provenance, report
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


class WaitingLane(LaneScheduler):
    """A lane in which no round begins before the host has read the one before it."""

    @property
    def decodes_alone(self) -> bool:
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
        "median of the ratios of the turns."
    )
    grid = Grid("Tokens per second of bare rounds", columns, lines)
    report("ahead.md", "Rounds that do not wait for the host", about, grid)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.ahead")
    main()
