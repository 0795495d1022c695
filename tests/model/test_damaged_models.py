"""Damaged checkpoints: the worker refuses or serves them, and no process is killed."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.hostile_checkpoints import HostileCheckpoint, hostile_checkpoints
from tests.support.model_loader import REFUSED, SERVED, ModelLoader, model_loader

LOADERS = 2


@pytest.mark.skipif(sys.platform != "linux", reason="Metal does not survive a fork")
def test_c4_the_worker_refuses_or_serves_any_damaged_checkpoint(tmp_path: Path) -> None:
    """No child is killed: not by a signal of its own, and not by the limits of time and memory.

    CVE-2026-7482; MLX GHSA-m354-cccg-cx5m, GHSA-gc76-m4ff-mfmx, GHSA-m6v2-px5w-fw97,
    GHSA-2m2v-7fpr-2g4c: loaders that trust the contents of a file.
    """
    checkpoints: list[HostileCheckpoint] = []

    @settings(
        max_examples=200,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile_checkpoints())
    def draw(checkpoint: HostileCheckpoint) -> None:
        checkpoints.append(checkpoint)

    draw()
    loaders: SimpleQueue[ModelLoader] = SimpleQueue()

    def check(number: int) -> None:
        folder = tmp_path / str(number)
        checkpoints[number].write(folder)
        loader = loaders.get()
        try:
            code, output = loader.load(folder)
        finally:
            loaders.put(loader)
        assert code in (SERVED, REFUSED), (checkpoints[number], output)
        assert "Traceback" not in output or code == SERVED
        shutil.rmtree(folder)

    with ExitStack() as stack, ThreadPoolExecutor(LOADERS) as pool:
        for _ in range(LOADERS):
            loaders.put(stack.enter_context(model_loader()))
        list(pool.map(check, range(len(checkpoints))))
