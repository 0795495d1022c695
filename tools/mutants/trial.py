"""Runs of mutants, and their results for as long as they are valid."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from tools.mutants.config import Config
from tools.mutants.measure import ARGUMENTS, Measured, file_of, without
from tools.mutants.mutants import Mutant
from tools.mutants.tree import PytestRun, Tree

_NO_TESTS = 5
_FIRST_TESTS_S = 3.0
_FIRST_FILES = 6
_RELIABLE_S = 0.1


class Outcome(StrEnum):
    """The outcome of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_RUN = "not run"
    """No test runs the line or uses a name that it defines."""
    ACCEPTED = "accepted"
    """The mutant is in the list of accepted survivors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a mutant."""

    key: str
    outcome: Outcome
    proof: str
    """A digest of the tests that determine the outcome."""
    killer: str = ""
    ran: int = 0
    """Number of tests that passed, or that were planned if one failed."""
    complete: bool = True
    """Whether the budget sufficed for all tests that run the line."""


class Results:
    """Results of this run and of earlier ones, one JSON document per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._by_key: dict[str, Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    document = json.loads(line)
                    document["outcome"] = Outcome(document["outcome"])
                    result = Result(**document)
                    self._by_key[result.key] = result

    def add(self, result: Result) -> None:
        """Store a result at once, so that an interruption loses none."""
        self._by_key[result.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps({**asdict(result), "outcome": result.outcome.value}) + "\n")

    def valid(self, mutant: Mutant, tests: Sequence[str], measured: Measured) -> Result | None:
        """Return an earlier result if the tests that determine it are unchanged."""
        result = self._by_key.get(mutant.key)
        if result is None:
            return None
        if result.killer:
            is_measured = file_of(result.killer) in measured.digests
            return (
                result if is_measured and result.proof == proof([result.killer], measured) else None
            )
        return result if result.proof == proof(tests, measured) else None


def proof(tests: Sequence[str], measured: Measured) -> str:
    """Return a digest of tests and all that they use."""
    files = sorted({file_of(test) for test in tests})
    text = json.dumps([sorted(tests), [measured.digests[file] for file in files]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Judge:
    """Runner of tests against mutants."""

    def __init__(self, config: Config, measured: Measured) -> None:
        self._config = config
        self._measured = measured

    def check(self, tree: Tree) -> None:
        """Run a test on the clean tree; raise RuntimeError if it fails."""
        run = self._run([min(self._measured.seconds, key=self._measured.seconds.__getitem__)], tree)
        if run.status != 0:
            raise RuntimeError(f"a test fails on the clean tree:\n{run.output}")

    def judge(self, mutant: Mutant, tests: Sequence[str], tree: Tree, *, complete: bool) -> Result:
        """Run tests against a mutant until one fails, beginning with the fastest files."""
        if not tests:
            return Result(key=mutant.key, outcome=Outcome.NOT_RUN, proof=proof((), self._measured))
        ran = 0
        with tree.mutated(mutant.module, mutant.mutated):
            for part in self._split(tests):
                remaining = list(part)
                while remaining:
                    run = self._run(remaining, tree)
                    killer = run.result["failed"] if run.result else ""
                    if run.status is None or (run.result and run.result["timed_out"]):
                        return self._killed(
                            mutant, Outcome.TIMED_OUT, killer or remaining[0], tests
                        )
                    if run.status == _NO_TESTS:
                        raise RuntimeError(f"pytest found no tests for {mutant.key}:\n{run.output}")
                    if run.status == 0:
                        ran += len(remaining)
                        break
                    if self._fails_again(killer, tree):
                        return self._killed(mutant, Outcome.KILLED, killer or remaining[0], tests)
                    at = remaining.index(killer)
                    ran += at
                    remaining = remaining[at + 1 :]
        return Result(
            key=mutant.key,
            outcome=Outcome.SURVIVED,
            proof=proof(tests, self._measured),
            ran=ran,
            complete=complete,
        )

    def _fails_again(self, killer: str, tree: Tree) -> bool:
        """Repeat a failure of a slow test: sockets and clocks may also fail on a busy machine."""
        if self._measured.seconds.get(killer, 0.0) < _RELIABLE_S:
            return True
        return self._run([killer], tree).status != 0

    def _killed(
        self, mutant: Mutant, outcome: Outcome, killer: str, tests: Sequence[str]
    ) -> Result:
        return Result(
            key=mutant.key,
            outcome=outcome,
            killer=killer,
            proof=proof([killer], self._measured),
            ran=len(tests),
        )

    def _split(self, tests: Sequence[str]) -> list[Sequence[str]]:
        """Split tests, so that most mutants end before all files are collected."""
        seconds, files = 0.0, set()
        for at, test in enumerate(tests):
            seconds += self._measured.seconds[test]
            files.add(file_of(test))
            if at and (seconds > _FIRST_TESTS_S or len(files) > _FIRST_FILES):
                return [tests[:at], tests[at:]]
        return [tests]

    def _run(self, tests: Sequence[str], tree: Tree) -> PytestRun:
        config, seconds = self._config, self._measured.seconds
        factor = config.timeout_factor
        limits_s = {test: max(config.timeout_test_s, factor * seconds[test]) for test in tests}
        files = list(dict.fromkeys(file_of(test) for test in tests))
        plan = {
            "limits_s": limits_s,
            "memory_gib": config.memory_gib,
            "arguments": [*ARGUMENTS, "-x", *without(config.without_plugins), *files],
        }
        clean_s = sum(seconds[test] for test in tests)
        return tree.pytest(plan, timeout_s=config.timeout_start_s + factor * clean_s)
