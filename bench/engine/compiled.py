"""The speed of a family whose rounds are compiled and do not wait, and of rounds as they were.

`python -m bench.engine.compiled` writes `bench/results/compiled.md`. Two lanes of one process
decode in turns with the same random weights: in one, the host describes each pass anew and reads a
round before the next begins; in the other, passes are compiled after the probe of the engine has
compared them, and rounds begin ahead. The model has 32 layers of small width, whose rounds have
many operations for the host to describe.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import version
from typing import Final

import mlx.core as mx

from bench.engine.ahead import LAYERS, ROWS, Side, WaitingLane, compare
from bench.families.checkpoints import VOCABULARY, build
from bench.families.configs import family
from bench.harness.blas import restart_with_fast_blas
from bench.harness.tables import Grid, provenance, report
from workers.demo import CHECKPOINT
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.checkpoint import Checkpoint, load_checkpoint
from workers.engine.model.device import cast_for_device
from workers.engine.model.target import CompiledPasses, Target
from workers.engine.startup.probes import probe_compiled_passes

_FAMILY: Final = "Llama 3"
_ROUNDS: Final = 12
_TURNS: Final = 7


def deep_models(demo: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return a deep model of random weights: with passes that are not compiled, and compiled."""
    config = family(_FAMILY).config(VOCABULARY) | {"num_hidden_layers": LAYERS}
    mx.random.seed(0)
    model = build(config)
    cast_for_device(model)
    mx.eval(model.parameters())
    targets = Target(model), Target(model)
    targets[0].compiles = CompiledPasses(plain=False, verify=False)
    targets[1].compiles = probe_compiled_passes(targets[1])
    assert targets[1].compiles.plain
    before, after = (replace(demo, target=target, head=None, eos=frozenset()) for target in targets)
    return before, after


def main() -> None:
    logging.disable()
    before, after = deep_models(load_checkpoint(CHECKPOINT))
    lines = []
    for rows in ROWS:
        sides = Side(WaitingLane, before, rows, 0), Side(LaneScheduler, after, rows, 0)
        lines.append((f"{_FAMILY}, {rows}", *compare(*sides, rounds=_ROUNDS, turns=_TURNS)))
    about = (
        f"{provenance()}, MLX {version('mlx')}; medians of {_TURNS} turns of {_ROUNDS} rounds each."
        " Ratio: median of the ratios of the turns. Before: passes are not compiled, and rounds "
        "wait for the host. A worker on a CPU compiles the passes of few families, since each "
        "kernel takes a C++ compiler a second there; this measures what a worker on a GPU does, on "
        "a CPU."
    )
    columns = ("model, rows", "before", "now", "ratio", "CPU a round, ms", "now")
    grid = Grid(f"Tokens per second of bare rounds, {LAYERS} layers", columns, lines)
    report("compiled.md", "Compiled rounds", about, grid)


if __name__ == "__main__":
    restart_with_fast_blas("bench.engine.compiled")
    main()
