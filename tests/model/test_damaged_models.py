"""Damaged checkpoints: the worker refuses or serves them, and no process is killed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.hostile_checkpoints import HostileCheckpoint, hostile_checkpoints
from tests.support.model_loader import REFUSED, SERVED, model_loader


@pytest.mark.skipif(sys.platform != "linux", reason="Metal does not survive a fork")
def test_c4_the_worker_refuses_or_serves_any_damaged_checkpoint(tmp_path: Path) -> None:
    """No child is killed: not by a signal of its own, and not by the limits of time and memory."""
    folder = tmp_path / "model"

    @settings(
        max_examples=200,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile_checkpoints())
    def check(checkpoint: HostileCheckpoint) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint.write(folder)
        code, output = loader.load(folder)
        assert code in (SERVED, REFUSED), output
        assert "Traceback" not in output or code == SERVED

    with model_loader() as loader:
        check()
