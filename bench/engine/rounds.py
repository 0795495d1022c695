"""Cost of a bare decode round of our lane: no HTTP, no other process, no client.

`python -m bench.engine.rounds --model FOLDER` prints one line of JSON. A round that drafts k tokens
adds more tokens than a plain one and costs more. Tokens per round over relative cost is the ceiling
of drafting on this machine, and `bench.engine` compares the result of the server with it.

With `--adaptive` it prints a table instead: the k that the lane chooses compared with each fixed k,
alternating, in one lane of one process. The first repetition warms up the lane and is not counted.
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
from paceline.request.profile import Sampling
from workers.demo import CHECKPOINT
from workers.engine.decode.row import Row, SpeculationCounter
from workers.engine.decode.step_graph import State, StepGraph
from workers.engine.engine import Engine, load_engine
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.kv_cache import KVCache, RowCache, capacity
from workers.engine.model.target import Target
from workers.engine.text.detokenizer import TextStream
from workers.engine.types import EngineSettings, Generation, LaneName, Prompt

DRAFT_LENGTHS: Final = (0, 1, 2)
LONGEST_RUN_ROUNDS: Final = 120
REPETITIONS: Final = 3
"""Repetitions of each k at each batch size, alternating with the others."""
ADAPTIVE_REPETITIONS: Final = 3
CONTEXTS_TOKENS: Final = (256, 4096)
ROLLBACKS: Final = 15
VERIFIED: Final = 3
ACCEPTED: Final = (1, 3, 2, 1)


def measure(model: Path) -> Bare:
    """Measure every k at every batch size, then rollbacks after short and long contexts."""
    loaded = _load(model)
    rounds = [
        _run(loaded, rows, k) for _ in range(REPETITIONS) for rows in STREAMS for k in DRAFT_LENGTHS
    ]
    rollbacks = [_rollback(loaded.checkpoint.target, context) for context in CONTEXTS_TOKENS]
    return Bare(rounds=rounds, rollbacks=rollbacks)


def compare(model: Path, repetitions: int) -> Grid:
    """Compare the k that the lane chooses with each fixed k."""
    loaded = _load(model)
    runs = [
        (k, _run(loaded, rows, k))
        for repetition in range(repetitions + 1)
        for rows in STREAMS
        for k in (*DRAFT_LENGTHS, None)
        if repetition or k is None  # the first repetition warms up
    ]
    runs = runs[len(STREAMS) :]
    return Grid(
        title=f"Tokens per second of bare rounds, medians of {repetitions} repetitions",
        columns=("", *(f"k={k}" for k in DRAFT_LENGTHS), "chosen", "gain", "ceiling", "of it"),
        rows=tuple(_comparison_row(rows, runs) for rows in STREAMS),
    )


def _comparison_row(rows: int, runs: Sequence[tuple[int | None, Round]]) -> tuple[str, ...]:
    speeds = {
        k: median(
            rows * run.tokens_per_row / run.cost_s
            for fixed_k, run in runs
            if (fixed_k, run.rows) == (k, rows)
        )
        for k in (*DRAFT_LENGTHS, None)
    }
    maximum = ceiling([run for fixed_k, run in runs if fixed_k is not None], rows)
    assert maximum is not None
    gain = speeds[None] / speeds[0]
    gains = (f"{gain:.2f}", f"{maximum:.2f}", f"{gain / maximum:.2f}")
    return (f"{rows} rows", *(f"{speed:.0f}" for speed in speeds.values()), *gains)


def _load(model: Path) -> Engine:
    return load_engine(
        EngineSettings(
            model=model,
            served_name="bench",
            lanes=(LaneName.TEXT_MTP,),
            draft_tokens=max(DRAFT_LENGTHS),
        )
    )


def _run(loaded: Engine, rows: int, k: int | None) -> Round:
    """Run rounds with rows that draft k tokens; with k None the lane chooses."""
    (lane,) = loaded.lanes
    active = [_row(loaded, lane, number, k) for number in range(rows)]
    for row in active:
        lane.add(row)
    while lane.running_rows < rows and not any(row.finish_reason for row in active):
        lane.step()
    lane.step()  # the first round after a join catches up
    before = sum(len(row.answer) for row in active)
    rounds = 0
    begun_s = time.perf_counter()
    while rounds < LONGEST_RUN_ROUNDS and lane.running_rows == rows:
        lane.step()
        rounds += 1
    elapsed_s = time.perf_counter() - begun_s
    tokens = sum(len(row.answer) for row in active) - before
    for row in active:
        row.cancelled = True
    while lane.busy:
        lane.step()
    if not rounds:
        raise SystemExit("An answer ended before all rows had joined.")
    max_draft = max(DRAFT_LENGTHS) if k is None else k
    return Round(
        rows=rows, k=max_draft, cost_s=elapsed_s / rounds, tokens_per_row=tokens / rounds / rows
    )


def _row(loaded: Engine, lane: LaneScheduler, number: int, k: int | None) -> Row:
    max_draft = max(DRAFT_LENGTHS) if k is None else k
    prompt = Prompt(text=loaded.prompts.chat(LONG[number % len(LONG)]))
    return Row(
        generation=Generation(
            request_id="bench", lane=lane.name, prompt=prompt, sampling=Sampling(temperature=0)
        ),
        prompt=loaded.prompts.prepare(prompt),
        seed=0,
        max_tokens=1000,
        ends=lane.ends,
        draft_tokens=max_draft,
        draft_tokens_fixed=k is not None,
        text=TextStream(loaded.prompts.decode),
        speculation=SpeculationCounter(max_draft),
        sink=lambda _: None,
    )


def _rollback(target: Target, context_tokens: int) -> Rollback:
    """Measure the rollback of four rows after a context."""
    graph = StepGraph(target, head=None)
    accepted = mx.array(ACCEPTED)
    offset = mx.full(accepted.shape, context_tokens, dtype=mx.int32)
    tokens = mx.ones((len(ACCEPTED), VERIFIED), dtype=mx.int32)
    verified = graph.verify(
        tokens, _state_after(target, context_tokens), offset, mx.zeros_like(offset)
    )
    mx.eval(verified.hidden, verified.layers)
    costs_s = []
    for _ in range(ROLLBACKS):
        begun_s = time.perf_counter()
        mx.eval(graph.roll_back(verified.layers, accepted, VERIFIED), offset + accepted)
        costs_s.append(time.perf_counter() - begun_s)
    return Rollback(context_tokens=context_tokens, cost_s=median(costs_s))


def _state_after(target: Target, context_tokens: int) -> State:
    """Read a prompt once and copy its state for all rows."""
    caches = target.new_caches()
    tokens = mx.arange(context_tokens, dtype=mx.int32)[None]
    mx.eval(target.forward(tokens % 512, caches, tokens))
    state: State = []
    for cache in caches:
        arrays = cache.state
        if isinstance(cache, KVCache):
            rows = RowCache(cache.keys, cache.values, tokens[:, -1] + 1)
            rows.resize(capacity(context_tokens + VERIFIED))
            arrays = rows.state
        state.append(tuple(mx.concatenate([array] * len(ACCEPTED)) for array in arrays))
    return state


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine.rounds", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument(
        "--adaptive", action="store_true", help="compare the chosen k with fixed ones"
    )
    options = parser.parse_args(arguments)
    if options.adaptive:
        grid = compare(options.model, ADAPTIVE_REPETITIONS)
        Console(highlight=False, width=100).print(grid.to_table())
        return
    print(json.dumps(asdict(measure(options.model))))


if __name__ == "__main__":
    main()
