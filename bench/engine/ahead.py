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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Final

import mlx.core as mx
from rich.console import Console
from rich.progress import track

from bench.families.checkpoints import build
from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, write_page
from paceline.request.profile import Sampling
from workers.demo import CHECKPOINT
from workers.engine.decode.row import Row, SpeculationCounter
from workers.engine.lane.admission import Admission
from workers.engine.lane.memory import measure_memory
from workers.engine.lane.scheduler import EngineParts, LaneScheduler
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.target import Target
from workers.engine.prefix.cache import PrefixCache
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.tokenizer import PreparedPrompt, PromptRenderer
from workers.engine.types import Generation, LaneName, LaneSettings, Prompt

RESULTS: Final = Path(__file__).parents[1] / "results"
ROWS: Final = (1, 4, 8)
DRAFT_TOKENS: Final = 2
LAYERS: Final = 32
ROUNDS: Final = 40
TURNS: Final = 9
WARM_UP_ROUNDS: Final = 8
PROMPT_TOKENS: Final = 24
_ENDLESS: Final = 1 << 20


class WaitingLane(LaneScheduler):
    """A lane in which no round begins before the host has read the one before it."""

    @property
    def decodes_alone(self) -> bool:
        """Return False: then every round waits."""
        return False


@dataclass
class Speed:
    """Samples of one lane."""

    tokens_per_s: list[float] = field(default_factory=list)
    cpu_ms_a_round: list[float] = field(default_factory=list)


Side = tuple[type[LaneScheduler], Checkpoint]


def ratio(before: Speed, after: Speed) -> float:
    """Return the median of the ratios of the turns: what slows one turn slows both its lanes."""
    pairs = zip(before.tokens_per_s, after.tokens_per_s, strict=True)
    return median(now / then for then, now in pairs)


def measure(
    sides: tuple[Side, Side], rows: int, k: int, *, rounds: int = ROUNDS, turns: int = TURNS
) -> tuple[Speed, Speed]:
    """Return the speed of two kinds of lanes, which decode in turns."""
    lanes = [_filled_lane(kind, checkpoint, rows, k) for kind, checkpoint in sides]
    speeds = Speed(), Speed()
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            lane, decoding = lanes[which]
            before = sum(len(row.answer) for row in decoding)
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                lane.step()
            elapsed_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
            if turn:  # the first turn warms up
                tokens = sum(len(row.answer) for row in decoding) - before
                speeds[which].tokens_per_s.append(tokens / elapsed_s)
                speeds[which].cpu_ms_a_round.append(1000 * cpu_s / rounds)
    return speeds


def _filled_lane(
    kind: type[LaneScheduler], checkpoint: Checkpoint, rows: int, k: int
) -> tuple[LaneScheduler, list[Row]]:
    prompts = PromptRenderer(checkpoint.processor)
    memory = measure_memory(checkpoint.target, checkpoint.head)
    parts = EngineParts(
        settings=LaneSettings(draft_tokens=k, max_rows=max(ROWS)),
        checkpoint=checkpoint,
        prompts=prompts,
        admission=Admission(checkpoint.target, memory, PrefixCache(0)),
    )
    lane = kind(LaneName.TEXT_MTP, parts)
    decoding = [_row(lane, prompts, number, k) for number in range(rows)]
    for row in decoding:
        lane.add(row)
    while lane.running_rows < rows:
        lane.step()
    for _ in range(WARM_UP_ROUNDS):
        lane.step()
    return lane, decoding


def _row(lane: LaneScheduler, prompts: PromptRenderer, number: int, k: int) -> Row:
    tokens = tuple(20 + (at * 7 + number) % 900 for at in range(PROMPT_TOKENS))
    return Row(
        generation=Generation(
            request_id="bench",
            lane=lane.name,
            prompt=Prompt(tokens=tokens),
            sampling=Sampling(temperature=0),
        ),
        prompt=PreparedPrompt(tokens=tokens),
        seed=0,
        max_tokens=_ENDLESS,
        ends=frozenset(),
        draft_tokens=k,
        draft_tokens_fixed=True,
        text=TextStream(prompts.decode),
        speculation=SpeculationCounter(k),
        sink=lambda _: None,
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
        *(("demo", demo, rows, k) for k in (0, DRAFT_TOKENS) for rows in ROWS),
        *((f"{LAYERS} layers", deep, rows, 0) for rows in ROWS),
    ]
    grid = Grid(
        title="Tokens per second of bare rounds",
        columns=("model, rows, drafts", "waiting", "ahead", "ratio", "CPU a round, ms", "ahead"),
        rows=tuple(_lines(cases)),
    )
    Console(highlight=False, width=100).print(grid.to_table())
    about = (
        f"{provenance()}, MLX {version('mlx')}; medians of {TURNS} turns of {ROUNDS} rounds each. "
        "Rounds begin before the host has read the last one (ahead), or wait for that. Ratio: "
        "median of the ratios of the turns."
    )
    write_page(RESULTS / "ahead.md", "Rounds that do not wait for the host", about, grid)


def _lines(cases: list[tuple[str, Checkpoint, int, int]]) -> Iterator[tuple[str, ...]]:
    for name, checkpoint, rows, k in track(cases, description="Measuring"):
        sides = (WaitingLane, checkpoint), (LaneScheduler, checkpoint)
        waiting, ahead = measure(sides, rows, k)
        slow, fast = median(waiting.tokens_per_s), median(ahead.tokens_per_s)
        yield (
            f"{name}, {rows}, {k}",
            f"{slow:.0f}",
            f"{fast:.0f}",
            f"{ratio(waiting, ahead):.2f}",
            f"{median(waiting.cpu_ms_a_round):.1f}",
            f"{median(ahead.cpu_ms_a_round):.1f}",
        )


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.ahead")
    main()
