"""The standing attacker of the benchmarks, for a moment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.attack.__main__ import main


@pytest.mark.skipif(sys.platform != "linux", reason="Metal does not survive a fork")
def test_a_short_attack_finds_nothing_and_its_sums_are_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program exits with an error if a promise does not hold."""
    only = [f"--only={name}" for name in ("raw-http", "lying-workers", "lying-reports", "bodies")]
    main(["--quick", "--seconds=2", "--log-dir", str(tmp_path), *only])
    printed = capsys.readouterr().out
    assert "lying-workers" in printed
    assert "in the access log" in " ".join(printed.split())
