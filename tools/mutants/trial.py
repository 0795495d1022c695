"""Try mutants, and keep each result for as long as it would come out the same."""

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
from tools.mutants.tree import Ended, Tree

_NO_TESTS = 5
_FIRST_TESTS_S = 3.0
_FIRST_FILES = 6
_CERTAIN_S = 0.1


class Outcome(StrEnum):
    """How the tests took a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_RUN = "not run"
    """No test runs the line, nor uses what it defines."""
    ACCEPTED = "accepted"
    """The list of accepted survivors holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a mutant."""

    key: str
    outcome: Outcome
    proof: str
    """A digest of what the outcome rests on."""
    killer: str = ""
    ran: int = 0
    """How many tests ran without noticing it, or were to run if one noticed."""
    complete: bool = True
    """Whether the budget sufficed for all tests that run the line."""


class Results:
    """Results of this run and of earlier ones, one JSON document a line."""

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
        """Keep a result at once, so that an interruption loses none."""
        self._by_key[result.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps({**asdict(result), "outcome": result.outcome.value}) + "\n")

    def valid(self, mutant: Mutant, tests: Sequence[str], measured: Measured) -> Result | None:
        """Return an earlier result, if the tests that it rests on are as they were."""
        result = self._by_key.get(mutant.key)
        if result is None:
            return None
        if result.killer:
            known = file_of(result.killer) in measured.digests
            return result if known and result.proof == proof([result.killer], measured) else None
        return result if result.proof == proof(tests, measured) else None


def proof(tests: Sequence[str], measured: Measured) -> str:
    """Digest tests and all that they use."""
    files = sorted({file_of(test) for test in tests})
    text = json.dumps([sorted(tests), [measured.digests[file] for file in files]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Judge:
    """Runs the tests against mutants."""

    def __init__(self, config: Config, measured: Measured) -> None:
        self._config = config
        self._measured = measured

    def check(self, tree: Tree) -> None:
        """Run a test of the clean tree as for a mutant; raise RuntimeError if it does not pass."""
        ended = self._run(
            [min(self._measured.seconds, key=self._measured.seconds.__getitem__)], tree
        )
        if ended.status != 0:
            raise RuntimeError(f"a test does not pass on the clean tree:\n{ended.output}")

    def judge(self, mutant: Mutant, tests: Sequence[str], tree: Tree, *, complete: bool) -> Result:
        """Run tests against a mutant until one fails, those of the fastest files first."""
        if not tests:
            return Result(key=mutant.key, outcome=Outcome.NOT_RUN, proof=proof((), self._measured))
        ran = 0
        with tree.mutated(mutant.module, mutant.mutated):
            for part in self._parts(tests):
                left = list(part)
                while left:
                    ended = self._run(left, tree)
                    killer = ended.result["failed"] if ended.result else ""
                    if ended.status is None or (ended.result and ended.result["timed_out"]):
                        return self._killed(mutant, Outcome.TIMED_OUT, killer or left[0], tests)
                    if ended.status == _NO_TESTS:
                        raise RuntimeError(
                            f"pytest found no tests for {mutant.key}:\n{ended.output}"
                        )
                    if ended.status == 0:
                        ran += len(left)
                        break
                    if self._certain(killer, tree):
                        return self._killed(mutant, Outcome.KILLED, killer or left[0], tests)
                    at = left.index(killer)
                    ran += at
                    left = left[at + 1 :]
        return Result(
            key=mutant.key,
            outcome=Outcome.SURVIVED,
            proof=proof(tests, self._measured),
            ran=ran,
            complete=complete,
        )

    def _certain(self, killer: str, tree: Tree) -> bool:
        """Repeat a failure of a slow test: sockets and clocks may fail on a busy machine alone."""
        if self._measured.seconds.get(killer, 0.0) < _CERTAIN_S:
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

    def _parts(self, tests: Sequence[str]) -> list[Sequence[str]]:
        """Divide tests, so that most mutants need not wait until all files are collected."""
        seconds, files = 0.0, set()
        for at, test in enumerate(tests):
            seconds += self._measured.seconds[test]
            files.add(file_of(test))
            if at and (seconds > _FIRST_TESTS_S or len(files) > _FIRST_FILES):
                return [tests[:at], tests[at:]]
        return [tests]

    def _run(self, tests: Sequence[str], tree: Tree) -> Ended:
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
