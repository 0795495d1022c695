"""What a round of our lane costs with nothing around it: no HTTP, no other process, no reader.

`python -m bench.rounds --model FOLDER` prints one line of JSON. A round that drafts k tokens brings
more than a plain one and costs more; tokens a round over relative cost is the ceiling of what
drafting can bring on this machine, and `bench.engine` compares what the server reaches with it.
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

from bench.bare import Bare, Rollback, Round
from bench.measurements import LONG, STREAMS
from policies.profile import Sampling
from workers.demo import CHECKPOINT
from workers.engine.assembly import Assembly, assemble
from workers.engine.detokenize import TextStream
from workers.engine.lane import Lane
from workers.engine.requests import Generation, LaneName, Prompt
from workers.engine.round_graph import RoundGraph, State
from workers.engine.row_cache import RowCache, capacity
from workers.engine.rows import Row
from workers.engine.seam import KVCache, Target
from workers.engine.settings import EngineSettings
from workers.engine.tally import SpeculationTally

DRAFT_LENGTHS: Final = (0, 1, 2)
LONGEST_RUN_ROUNDS: Final = 120
TURNS: Final = 3
"""Times each k is measured at a batch size, in turn with the others."""
CONTEXTS_TOKENS: Final = (256, 4096)
ROLLBACKS: Final = 15
VERIFIED: Final = 3
KEPT: Final = (1, 3, 2, 1)


def measure(model: Path) -> Bare:
    """Measure every k at every batch size, then rollbacks behind short and long contexts."""
    settings = EngineSettings(
        model=model,
        served_name="bench",
        lanes=(LaneName.TEXT_MTP,),
        draft_tokens=max(DRAFT_LENGTHS),
    )
    assembly = assemble(settings)
    rounds = [
        _run(assembly, rows, k) for _ in range(TURNS) for rows in STREAMS for k in DRAFT_LENGTHS
    ]
    rollbacks = [_rollback(assembly.checkpoint.target, context) for context in CONTEXTS_TOKENS]
    return Bare(rounds=rounds, rollbacks=rollbacks)


def _run(assembly: Assembly, rows: int, k: int) -> Round:
    (lane,) = assembly.lanes
    live = [_row(assembly, lane, number, k) for number in range(rows)]
    for row in live:
        lane.add(row)
    while lane.live < rows and not any(row.finish for row in live):
        lane.step()
    lane.step()  # the first round behind a join catches up
    before = sum(len(row.answer) for row in live)
    rounds = 0
    begun_s = time.perf_counter()
    while rounds < LONGEST_RUN_ROUNDS and lane.live == rows:
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
    return Round(rows=rows, k=k, cost_s=elapsed_s / rounds, tokens_a_row=tokens / rounds / rows)


def _row(assembly: Assembly, lane: Lane, number: int, k: int) -> Row:
    prompt = Prompt(text=assembly.prompts.chat(LONG[number % len(LONG)]))
    return Row(
        generation=Generation(
            request_id="bench", lane=lane.name, prompt=prompt, sampling=Sampling(temperature=0)
        ),
        prompt=assembly.prompts.prepare(prompt),
        seed=0,
        max_tokens=1000,
        draft_tokens=k,
        draft_tokens_asked=True,
        text=TextStream(assembly.prompts.decode),
        tally=SpeculationTally(k),
        sink=lambda _: None,
    )


def _rollback(target: Target, context_tokens: int) -> Rollback:
    """Time what undoes the rejected tokens of four rows behind a context."""
    graph = RoundGraph(target, head=None)
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
        mx.eval(graph.keep(verified.layers, kept, VERIFIED), offset + kept)
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
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    options = parser.parse_args(arguments)
    print(json.dumps(asdict(measure(options.model))))


if __name__ == "__main__":
    main()
