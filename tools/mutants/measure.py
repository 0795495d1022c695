"""The map of tests and the lines that they run.

The map of a test file is valid until something changes that its tests use.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tools.mutants.config import Config
from tools.mutants.reach import Line
from tools.mutants.tree import PytestRun, Tree

ARGUMENTS = ("-q", "--tb=short", "--hypothesis-seed=0")
_NO_TESTS = 5


@dataclass(slots=True)
class Measured:
    """Measurements of the tests."""

    seconds: dict[str, float] = field(default_factory=dict)
    """The clean time of each test that passes."""
    tests_of: dict[Line, list[str]] = field(default_factory=lambda: defaultdict(list))
    digests: dict[str, str] = field(default_factory=dict)
    """For each file of tests, a digest of all that its tests use."""
    files: set[str] = field(default_factory=set)
    """All measured files."""
    failed: list[str] = field(default_factory=list)
    """Tests that fail on the clean tree; mutants run without them."""
    broken: list[str] = field(default_factory=list)
    """Files of tests that could not be measured."""

    def fastest(self, tests: Iterable[str], budget_s: float) -> tuple[list[str], bool]:
        """Order tests by time and file within a budget; return whether all of them fit."""
        by_file: dict[str, list[str]] = defaultdict(list)
        chosen_s = 0.0
        candidates = sorted(
            set(tests) & self.seconds.keys(), key=lambda test: (self.seconds[test], test)
        )
        chosen: list[str] = []
        for test in candidates:
            chosen_s += self.seconds[test]
            if chosen and chosen_s > budget_s:
                break
            chosen.append(test)
        for test in chosen:
            by_file[file_of(test)].append(test)

        def mean_s(file: str) -> float:
            return sum(self.seconds[test] for test in by_file[file]) / len(by_file[file])

        ordered = [test for file in sorted(by_file, key=mean_s) for test in by_file[file]]
        return ordered, len(chosen) == len(candidates)


def file_of(test: str) -> str:
    """Return the file of a test."""
    return test.partition("::")[0]


def test_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the test files; raise ValueError for a path without tests."""
    files_found: list[str] = []
    for name in paths:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        if not files:
            raise ValueError(f"no tests in {name}")
        files_found.extend(file.relative_to(root).as_posix() for file in files)
    return list(dict.fromkeys(files_found))


class Measurer:
    """Measures test files and stores the results."""

    def __init__(self, config: Config, root: Path, state: Path) -> None:
        self._config = config
        self._root = root
        self._folder = state / "lines"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hash = cache(self._hash_file)
        self._common = self._hash_common()

    def outdated(self, files: Sequence[str]) -> list[str]:
        """Return the test files that need a measurement."""
        return [file for file in files if self._load(file) is None]

    def measure(
        self, files: Sequence[str], trees: Sequence[Tree], *, done: Callable[[], None]
    ) -> list[tuple[str, PytestRun]]:
        """Measure test files concurrently; return those that failed."""
        broken: list[tuple[str, PytestRun]] = []
        free_trees: SimpleQueue[Tree] = SimpleQueue()
        for tree in trees:
            free_trees.put(tree)
        with ThreadPoolExecutor(len(trees)) as threads:
            runs = {threads.submit(self._measure, file, free_trees): file for file in files}
            waiting: set[Future[PytestRun]] = set(runs)
            try:
                while waiting:
                    finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for run in finished:
                        pytest_run = run.result()
                        if pytest_run.result is None or pytest_run.result["status"] not in (
                            0,
                            1,
                            _NO_TESTS,
                        ):
                            broken.append((runs[run], pytest_run))
                        else:
                            self._save(runs[run], pytest_run.result)
                        done()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                for tree in trees:
                    tree.close()
                raise
        return broken

    def load(self, files: Sequence[str]) -> Measured:
        """Combine the measurements."""
        measured = Measured()
        for file in files:
            record = self._load(file)
            if record is None:
                measured.broken.append(file)
                continue
            measured.digests[file] = record["digest"]
            failed = set(record["failed"])
            measured.failed.extend(sorted(failed))
            for test, seconds in record["seconds"].items():
                if test not in failed:
                    measured.seconds[test] = seconds
            for name, tests in record["files"].items():
                measured.files.add(name)
                for test, lines in tests.items():
                    if test not in failed:
                        for line in lines:
                            measured.tests_of[name, line].append(test)
        return measured

    def _measure(self, file: str, free_trees: SimpleQueue[Tree]) -> PytestRun:
        tree = free_trees.get()
        try:
            plan = {
                "sources": [str(tree.root / name) for name in self._config.measured],
                "arguments": [*ARGUMENTS, *without(self._config.without_plugins), file],
                "memory_gib": 0,
            }
            return tree.pytest(plan, timeout_s=self._config.measure_timeout_s)
        finally:
            free_trees.put(tree)

    def _save(self, file: str, result: Mapping[str, Any]) -> None:
        used = {name: self._hash(name) for name in [*result["files"], file]}
        record = {**result, "used": used, "common": self._common, "digest": self._digest(used)}
        path = self._path(file)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(record, separators=(",", ":")))
        unfinished.rename(path)

    def _load(self, file: str) -> dict[str, Any] | None:
        path = self._path(file)
        if not path.exists():
            return None
        record: dict[str, Any] = json.loads(path.read_text())
        if record["common"] != self._common:
            return None
        fresh = all(self._hash(name) == digest for name, digest in record["used"].items())
        return record if fresh else None

    def _digest(self, used: Mapping[str, str]) -> str:
        text = json.dumps([self._common, sorted(used.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _path(self, file: str) -> Path:
        return self._folder / f"{file.replace('/', '.')}.json"

    def _hash_file(self, name: str) -> str:
        path = self._root / name
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""

    def _hash_common(self) -> str:
        """Return a digest of files that tests use implicitly: settings, data, conftests."""
        digest = hashlib.sha256(repr((ARGUMENTS, self._config.without_plugins)).encode())
        folders = [self._root / name for name in self._config.measured]
        paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        data = [path for path in paths if path.suffix != ".py" and "__pycache__" not in path.parts]
        conftests = [path for path in paths if path.name == "conftest.py"]
        for path in sorted([*data, *conftests, self._root / "pyproject.toml"]):
            digest.update(path.relative_to(self._root).as_posix().encode() + path.read_bytes())
        return digest.hexdigest()[:16]


def without(plugins: Iterable[str]) -> list[str]:
    """Return the arguments that leave plugins of pytest out."""
    return [part for name in plugins for part in ("-p", f"no:{name}")]
