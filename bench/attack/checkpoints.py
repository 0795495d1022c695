"""Damaged checkpoints: each is loaded in a child of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from bench.attack.attack import Tally
from bench.harness.drawn import drawn
from tests.support.hostile_checkpoints import HostileCheckpoint, hostile_checkpoints
from tests.support.model_loader import REFUSED, SERVED, ModelLoader, model_loader

_BATCH: Final = 50
"""Variants that are in memory at the same time."""
_LOADERS: Final = 2
_WORDS: Final = {SERVED: "served", REFUSED: "refused"}
NAME: Final = "checkpoints"
PROMISE: Final = "exit code 3 and one sentence, or served; no child killed"


def load_checkpoints(count: int, seed: int, tally: Tally, on_load: Callable[[], None]) -> None:
    """Load variants of the demo checkpoint, each in a child that a process forks."""
    loaders: SimpleQueue[ModelLoader] = SimpleQueue()
    with (
        tempfile.TemporaryDirectory(prefix="paceline-attack-") as home,
        ExitStack() as stack,
        ThreadPoolExecutor(_LOADERS) as pool,
    ):
        for _ in range(_LOADERS):
            loaders.put(stack.enter_context(model_loader()))

        def load(number: int, checkpoint: HostileCheckpoint) -> tuple[int, str]:
            folder = Path(home) / str(number)
            checkpoint.write(folder)
            loader = loaders.get()
            try:
                return loader.load(folder)
            finally:
                loaders.put(loader)
                shutil.rmtree(folder)

        for first in range(0, count, _BATCH):
            checkpoints = drawn(hostile_checkpoints(), min(_BATCH, count - first), seed + first)
            results = pool.map(load, range(first, first + len(checkpoints)), checkpoints)
            for checkpoint, (code, output) in zip(checkpoints, results, strict=True):
                tally.inputs += 1
                tally.answers[_WORDS.get(code, f"exit code {code}")] += 1
                if code not in _WORDS or (code == REFUSED and "Traceback" in output):
                    tally.fail(f"exit code {code}: {output[-300:]}", checkpoint)
                on_load()
