"""The training loop of all phases: steps, learning rate, progress bar and snapshots."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

import mlx.core as mx
from mlx import nn
from rich.progress import Progress

from tools.demo_model.muon import Muon
from tools.demo_model.snapshots import completed_steps, load_tensors, save_module, save_tensors

SEED: Final = 20
SNAPSHOT_INTERVAL: Final = 100
MATRIX_RATE: Final = 0.01
OTHER_RATE: Final = 0.015
_WARM_UP: Final = 40
_MIN_SHARE: Final = 0.02

ComputeStep = Callable[[int], tuple[Any, mx.array]]
"""Step number -> gradients and loss."""


@dataclass(frozen=True)
class Work:
    """The folder, progress bar and rank of one training process."""

    folder: Path
    progress: Progress
    group: Any

    @property
    def is_leader(self) -> bool:
        """Return whether this rank writes files."""
        return int(self.group.rank()) == 0

    def synchronise(self) -> None:
        """Wait for all ranks: afterwards, they can read the files of the leader."""
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=self.group))

    def seeded(self, name: str) -> Random:
        """Return a random generator for one purpose and rank."""
        return Random(f"{SEED} {name} {self.group.rank()}")

    def common(self, name: str) -> Random:
        """Return a random generator that is equal in all ranks."""
        return Random(f"{SEED} {name}")

    def weights(self, name: str) -> Path:
        """Return the path of the output file of a phase."""
        return self.folder / f"{name}.safetensors"


Schedule = tuple[tuple[float, float], ...]
"""Points (step, share of the learning rate) with straight lines between them."""


def _rate_share(step: int, schedule: Schedule) -> float:
    """Return the share of the learning rate: _WARM_UP steps up, then by the schedule."""
    down = schedule[0][1]
    for (start, high), (end, low) in pairwise(schedule):
        if step >= start:
            down = high + (low - high) * (step - start) / (end - start)
    return min(1.0, (step + 1) / _WARM_UP) * max(_MIN_SHARE, down)


def _is_matrix(name: str, value: mx.array) -> bool:
    """Return whether Muon updates a parameter: every matrix, and the patch kernel."""
    return "patch_embed.proj.weight" in name or (value.ndim == 2 and "embed" not in name)


def optimise(
    work: Work, name: str, module: Any, compute_step: ComputeStep, schedule: Schedule
) -> None:
    """Train the trainable parameters by the schedule; save them to `name`.safetensors."""
    steps = int(schedule[-1][0])
    optimiser = Muon(module.trainable_parameters(), _is_matrix)
    part, state = work.weights(f"{name}.part"), work.weights(f"{name}.state")
    start = 0
    if part.exists() and state.exists():
        module.load_weights(str(part), strict=False)
        optimiser.state.update(load_tensors(state))
        start = completed_steps(state)
    bar = work.progress.add_task(name, total=steps, completed=start)
    average = 0.0
    for step in range(start, steps):
        gradients, loss = compute_step(step)
        gradients = nn.average_gradients(gradients, work.group)
        rate_share = _rate_share(step, schedule)
        optimiser.update(module, gradients, MATRIX_RATE * rate_share, OTHER_RATE * rate_share)
        mx.eval(loss, module.parameters(), optimiser.state)
        average = float(loss) if step == start else 0.97 * average + 0.03 * float(loss)
        work.progress.update(bar, advance=1, description=f"{name}  loss {average:.3f}")
        if work.is_leader and (step + 1) % SNAPSHOT_INTERVAL == 0:
            save_module(part, module)
            save_tensors(state, optimiser.state)
    if work.is_leader:
        save_module(work.weights(name), module)
        part.unlink(missing_ok=True)
        state.unlink(missing_ok=True)
