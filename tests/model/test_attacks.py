"""The standing attacker of the benchmarks, for a moment."""

import subprocess
import sys
from pathlib import Path


def test_a_short_attack_finds_nothing_and_its_sums_are_exact(tmp_path: Path) -> None:
    """The program exits with an error if a promise does not hold."""
    only = [f"--only={name}" for name in ("raw-http", "lying-workers", "lying-reports")]
    arguments = ("--quick", "--seconds=1", "--folder", str(tmp_path), *only)
    attack = subprocess.run(
        [sys.executable, "-m", "bench.attack", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert attack.returncode == 0, attack.stdout + attack.stderr
    assert "lying-workers" in attack.stdout
    assert "in the access log" in " ".join(attack.stdout.split())
