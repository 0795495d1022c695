"""What a round of our lane costs with nothing around it: no HTTP, no other process, no reader.

`python -m bench.engine.rounds --model FOLDER` prints one line of JSON. A round that drafts k tokens
brings more than a plain one and costs more; tokens a round over relative cost is the ceiling of
what drafting can bring on this machine, and `bench.engine` compares what the server reaches with
it.

With `--adaptive` it prints a table instead: the k that the lane chooses beside each fixed one, in
turns, on one lane in one process. The first turn is where the lane learns, and counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Final

import mlx.core as mx
from rich.console import Console

from bench.engine.bare import Bare, Rollback, Round
from bench.engine.measurements import LONG, STREAMS
from bench.engine.targets import ceiling
from bench.harness.tables import Grid
from policies.request.profile import Sampling
from workers.demo import CHECKPOINT
from workers.engine.detokenizer import TextStream
from workers.engine.engine import Engine, load_engine
from workers.engine.kv_cache import RowCache, capacity
from workers.engine.model import KVCache, Target
from workers.engine.row import Row, SpeculationCounter
from workers.engine.scheduler import LaneScheduler
from workers.engine.step_graph import State, StepGraph
from workers.engine.types import EngineSettings, Generation, LaneName, Prompt

DRAFT_LENGTHS: Final = (0, 1, 2)
LONGEST_RUN_ROUNDS: Final = 120
TURNS: Final = 3
"""Times each k is measured at a batch size, in turn with the others."""
ADAPTIVE_TURNS: Final = 3
CONTEXTS_TOKENS: Final = (256, 4096)
ROLLBACKS: Final = 15
VERIFIED: Final = 3
KEPT: Final = (1, 3, 2, 1)


def measure(model: Path) -> Bare:
    """Measure every k at every batch size, then rollbacks behind short and long contexts."""
    assembly = _assemble(model)
    rounds = [
        _run(assembly, rows, k) for _ in range(TURNS) for rows in STREAMS for k in DRAFT_LENGTHS
    ]
    rollbacks = [_rollback(assembly.checkpoint.target, context) for context in CONTEXTS_TOKENS]
    return Bare(rounds=rounds, rollbacks=rollbacks)


def compare(model: Path, turns: int) -> Grid:
    """Measure the k that the lane chooses beside each fixed one, in turns."""
    assembly = _assemble(model)
    runs = [
        (k, _run(assembly, rows, k))
        for turn in range(turns + 1)
        for rows in STREAMS
        for k in (*DRAFT_LENGTHS, None)
        if turn or k is None  # the first turn is for learning
    ]
    runs = runs[len(STREAMS) :]
    return Grid(
        title=f"Tokens a second of bare rounds, medians of {turns} turns",
        columns=("", *(f"k={k}" for k in DRAFT_LENGTHS), "chosen", "gain", "ceiling", "of it"),
        rows=tuple(_compared(rows, runs) for rows in STREAMS),
    )


def _compared(rows: int, runs: Sequence[tuple[int | None, Round]]) -> tuple[str, ...]:
    speeds = {
        k: median(
            rows * run.tokens_a_row / run.cost_s
            for fixed_k, run in runs
            if (fixed_k, run.rows) == (k, rows)
        )
        for k in (*DRAFT_LENGTHS, None)
    }
    most = ceiling([run for fixed_k, run in runs if fixed_k is not None], rows)
    assert most is not None
    gain = speeds[None] / speeds[0]
    gains = (f"{gain:.2f}", f"{most:.2f}", f"{gain / most:.2f}")
    return (f"{rows} rows", *(f"{speed:.0f}" for speed in speeds.values()), *gains)


def _assemble(model: Path) -> Engine:
    return load_engine(
        EngineSettings(
            model=model,
            served_name="bench",
            lanes=(LaneName.TEXT_MTP,),
            draft_tokens=max(DRAFT_LENGTHS),
        )
    )


def _run(assembly: Engine, rows: int, k: int | None) -> Round:
    """Run rounds of so many rows that draft k tokens, or what the lane chooses where k is None."""
    (lane,) = assembly.lanes
    live = [_row(assembly, lane, number, k) for number in range(rows)]
    for row in live:
        lane.add(row)
    while lane.running_rows < rows and not any(row.finish_reason for row in live):
        lane.step()
    lane.step()  # the first round behind a join catches up
    before = sum(len(row.answer) for row in live)
    rounds = 0
    begun_s = time.perf_counter()
    while rounds < LONGEST_RUN_ROUNDS and lane.running_rows == rows:
        lane.step()
        rounds += 1
    elapsed_s = time.perf_counter() - begun_s
    tokens = sum(len(row.answer) for row in live) - before
    for row in live:
        row.cancelled = True
    while lane.busy:
        lane.step()
    if not rounds:
        raise SystemExit("An answer ended before all rows had joined: nothing to measure.")
    longest = max(DRAFT_LENGTHS) if k is None else k
    return Round(
        rows=rows, k=longest, cost_s=elapsed_s / rounds, tokens_a_row=tokens / rounds / rows
    )


def _row(assembly: Engine, lane: LaneScheduler, number: int, k: int | None) -> Row:
    longest = max(DRAFT_LENGTHS) if k is None else k
    prompt = Prompt(text=assembly.prompts.chat(LONG[number % len(LONG)]))
    return Row(
        generation=Generation(
            request_id="bench", lane=lane.name, prompt=prompt, sampling=Sampling(temperature=0)
        ),
        prompt=assembly.prompts.prepare(prompt),
        seed=0,
        max_tokens=1000,
        draft_tokens=longest,
        draft_tokens_fixed=k is not None,
        text=TextStream(assembly.prompts.decode),
        speculation=SpeculationCounter(longest),
        sink=lambda _: None,
    )


def _rollback(target: Target, context_tokens: int) -> Rollback:
    """Time what undoes the rejected tokens of four rows behind a context."""
    graph = StepGraph(target, head=None)
    kept = mx.array(KEPT)
    offset = mx.full(kept.shape, context_tokens, dtype=mx.int32)
    tokens = mx.ones((len(KEPT), VERIFIED), dtype=mx.int32)
    verified = graph.verify(
        tokens, _state_behind(target, context_tokens), offset, mx.zeros_like(offset)
    )
    mx.eval(verified.hidden, verified.layers)
    costs_s = []
    for _ in range(ROLLBACKS):
        begun_s = time.perf_counter()
        mx.eval(graph.roll_back(verified.layers, kept, VERIFIED), offset + kept)
        costs_s.append(time.perf_counter() - begun_s)
    return Rollback(context_tokens=context_tokens, cost_s=median(costs_s))


def _state_behind(target: Target, context_tokens: int) -> State:
    """Read a prompt once and give it to all rows."""
    caches = target.new_caches()
    tokens = mx.arange(context_tokens, dtype=mx.int32)[None]
    mx.eval(target.forward(tokens % 512, caches, tokens).hidden)
    state: State = []
    for cache in caches:
        arrays = cache.state
        if isinstance(cache, KVCache):
            rows = RowCache(cache.keys, cache.values, tokens[:, -1] + 1)
            rows.resize(capacity(context_tokens + VERIFIED))
            arrays = rows.state
        state.append(tuple(mx.concatenate([array] * len(KEPT)) for array in arrays))
    return state


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.rounds", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--adaptive", action="store_true", help="the chosen k beside fixed ones")
    options = parser.parse_args(arguments)
    if options.adaptive:
        grid = compare(options.model, ADAPTIVE_TURNS)
        Console(highlight=False, width=100).print(grid.drawn())
        return
    print(json.dumps(asdict(measure(options.model))))


if __name__ == "__main__":
    main()
