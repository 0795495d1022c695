"""Cost of a bare decode round of our lane: no HTTP, no other process, no client.

`python -m bench.engine.rounds --model FOLDER` prints one line of JSON. A round that drafts k tokens
adds more tokens than a plain one and costs more. Tokens per round over relative cost is the ceiling
of drafting on this machine, and `bench.engine` compares the result of the server with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import mlx.core as mx

from bench.engine.measurements import DRAFT_LENGTHS, LONG, STREAMS
from bench.harness.blas import preload
from bench.harness.options import parser
from bench.harness.servers import ROOT
from tests.support.engine_lane import row_for
from workers.engine.decode.step_graph import State, StepGraph
from workers.engine.engine import Engine, load_engine
from workers.engine.model.kv_cache import KVCache, RowCache, capacity
from workers.engine.model.target import Target
from workers.engine.types import EngineSettings, LaneName, Prompt

_LONGEST_RUN_ROUNDS: Final = 120
_REPETITIONS: Final = 3
"""Repetitions of each k at each batch size, alternating with the others."""
_CONTEXTS_TOKENS: Final = (256, 4096)
_ROLLBACKS: Final = 15
_VERIFIED: Final = 3
_ACCEPTED: Final = (1, 3, 2, 1)


class Round(NamedTuple):
    """The mean over the rounds of one run in which all rows decoded."""

    rows: int
    k: int
    cost_s: float
    tokens_per_row: float


class Rollback(NamedTuple):
    """The cost of a rollback of four rows after a verify."""

    context_tokens: int
    cost_s: float


class Bare(NamedTuple):
    """The rounds and rollbacks of all runs."""

    rounds: list[Round]
    rollbacks: list[Rollback]


async def measure_bare(model: Path) -> Bare:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, "--model", str(model)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **preload()},
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{__name__} ended with code {process.returncode}")
    rounds, rollbacks = json.loads(output.splitlines()[-1])
    return Bare([Round(*one) for one in rounds], [Rollback(*one) for one in rollbacks])


def measure(model: Path) -> Bare:
    """Measure every k at every batch size, then rollbacks after short and long contexts."""
    engine = load_engine(
        EngineSettings(
            model=model,
            served_name="bench",
            lanes=(LaneName.TEXT_MTP,),
            draft_tokens=max(DRAFT_LENGTHS),
        )
    )
    rounds = [
        _run(engine, rows, k)
        for _ in range(_REPETITIONS)
        for rows in STREAMS
        for k in DRAFT_LENGTHS
    ]
    rollbacks = [_rollback(engine.checkpoint.target, context) for context in _CONTEXTS_TOKENS]
    return Bare(rounds, rollbacks)


def _run(engine: Engine, rows: int, k: int) -> Round:
    """Run rounds with rows that draft k tokens."""
    (lane,) = engine.lanes
    active = []
    for number in range(rows):
        prompt = Prompt(text=engine.prompts.chat(LONG[number % len(LONG)]))
        prepared = engine.prompts.prepare(prompt)
        active.append(row_for(lane, engine.prompts, prepared, k, 1000))
        lane.add(active[-1])
    while lane.running_rows < rows and not any(row.finish_reason for row in active):
        lane.step()
    lane.step()  # the first round after a join catches up
    before = sum(len(row.answer) for row in active)
    rounds = 0
    begun_s = time.perf_counter()
    while rounds < _LONGEST_RUN_ROUNDS and lane.running_rows == rows:
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
    return Round(rows, k, elapsed_s / rounds, tokens / rounds / rows)


def _rollback(target: Target, context_tokens: int) -> Rollback:
    graph = StepGraph(target, head=None)
    accepted = mx.array(_ACCEPTED)
    offset = mx.full(accepted.shape, context_tokens, dtype=mx.int32)
    tokens = mx.ones((len(_ACCEPTED), _VERIFIED), dtype=mx.int32)
    state = _state_after(target, context_tokens)
    verified = graph.verify(tokens, state, offset, mx.zeros_like(offset))
    mx.eval(verified.hidden, verified.layers)
    costs_s = []
    for _ in range(_ROLLBACKS):
        begun_s = time.perf_counter()
        mx.eval(graph.roll_back(verified.layers, accepted, _VERIFIED), offset + accepted)
        costs_s.append(time.perf_counter() - begun_s)
    return Rollback(context_tokens, median(costs_s))


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
            rows.resize(capacity(context_tokens + _VERIFIED))
            arrays = rows.state
        state.append(tuple(mx.concatenate([array] * len(_ACCEPTED)) for array in arrays))
    return state


if __name__ == "__main__":
    options = parser("engine.rounds", __doc__, quick=False, model=True).parse_args()
    print(json.dumps(measure(options.model)))
