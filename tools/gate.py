"""Run the tests, and tell a test that failed once from one that fails.

`python -m tools.gate` runs `make test`. It runs each test that failed once more, in a process of
its own and with the same seed. It exits with 1 if one fails again, if more than three failed, or
if one of them is a unit test, which has no excuse. At its end it prints the tests that failed
once, the ten slowest files, and the time of a fixed loop of work, by which the times of two
machines compare.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

MAX_FLAKES = 3
_LOOP = 3_000_000
_WITH_BLAS = Path(__file__).parents[1] / "scripts/with-blas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One test of a JUnit report."""

    file: str
    """Its path from the root; empty for what is no test, such as a process that crashed."""
    test: str
    """Its id, by which pytest runs it."""
    seconds: float
    failed: bool

    @property
    def unit(self) -> bool:
        """Whether it opens no socket and starts no process."""
        return self.file.startswith("tests/unit/")


def read_report(report: Path) -> list[Outcome]:
    """Return the tests of a JUnit report of the family xunit1, which names the files."""
    return [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    file = case.get("file", "")
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".").split(".")
    return Outcome(
        file=file,
        test="::".join(part for part in (file, *classes, case.get("name", "")) if part),
        seconds=float(case.get("time", 0)),
        failed=case.find("failure") is not None or case.find("error") is not None,
    )


def needs_a_mend(failed: Sequence[Outcome]) -> str:
    """Return why these failures cannot be flakes; an empty string if they may be."""
    if not all(outcome.file for outcome in failed):
        return "a file could not be read, or a process ended"
    if unit := next((outcome.test for outcome in failed if outcome.unit), ""):
        return f"{unit} is a unit test"
    if len(failed) > MAX_FLAKES:
        return f"{len(failed)} tests failed, and a flake comes alone"
    return ""


def slowest_files(outcomes: Iterable[Outcome], count: int = 10) -> list[tuple[str, float]]:
    """Return the files whose tests took the longest, with their seconds."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for outcome in outcomes:
        seconds[outcome.file] += outcome.seconds
    return sorted(seconds.items(), key=lambda one: -one[1])[:count]


def loop_seconds() -> float:
    """Return the seconds that this machine takes for a fixed loop of work."""
    began = time.perf_counter()
    total = 0
    for number in range(_LOOP):
        total += number * number % 7
    return time.perf_counter() - began


def main() -> int:
    """Return the exit code of the gate."""
    seed = random.getrandbits(32)
    loop_s = loop_seconds()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        options = f"--junitxml={report} -o junit_family=xunit1 --randomly-seed={seed}"
        status = subprocess.run(["make", "test", f"ARGS={options}"], check=False).returncode
        outcomes = read_report(report) if report.exists() else []
    tests_s = time.monotonic() - began
    failed = list({outcome.test: outcome for outcome in outcomes if outcome.failed}.values())
    print(f"\nThe slowest of {len(outcomes)} tests, by file:")
    for file, seconds in slowest_files(outcomes):
        print(f"  {seconds:6.1f} s  {file}")
    print(
        f"The tests took {tests_s:.0f} s (seed {seed}). A fixed loop of work took {loop_s:.2f} s "
        f"before them and {loop_seconds():.2f} s after them.",
        flush=True,
    )
    if status == 0:
        return 0
    reason = needs_a_mend(failed) if failed else "the test command failed"
    for outcome in failed if not reason else ():
        print(f"\n{outcome.test} failed; once more, alone:", flush=True)
        if not _passes(outcome.test, seed):
            reason = f"{outcome.test} failed twice"
            break
    if reason:
        print(f"Red: {reason}.")
        return 1
    print(
        "Green, but these tests failed once; mend them, or write down why, before the next change:"
    )
    for outcome in failed:
        print(f"  {outcome.test}")
    return 0


def _passes(test: str, seed: int) -> bool:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    pytest = [sys.executable, "-m", "pytest", f"--randomly-seed={seed}", test]
    ran = subprocess.run([_WITH_BLAS, *pytest], env={**os.environ, "PATH": path}, check=False)
    return ran.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
