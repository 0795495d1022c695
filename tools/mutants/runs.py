"""Copies of the project's files in which tests run, and which files of tests run which lines."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PYTEST = "-m pytest -q -x --tb=short --hypothesis-seed=0 -p no:cacheprovider -p no:randomly"
_NO_TESTS = 5
_STOP_S = 5.0
_MEASURE_TIMEOUT_S = 900.0
_MTIME_S = 1_000_000_000


class TreeClosed(Exception):
    """The tree was closed while pytest ran in it."""


class Tree:
    """A copy of the tree with at most one run of pytest."""

    def __init__(self, root: Path, original: Path, files: Sequence[str]) -> None:
        self.root = root / "tree"
        self._scratch = root
        self._mtimes_s = itertools.count(_MTIME_S)
        self._running: subprocess.Popen[bytes] | None = None
        self._closed = False
        for name in files:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original / name, target, follow_symlinks=False)

    @contextlib.contextmanager
    def mutated(self, module: str, source: str) -> Iterator[None]:
        """Replace the source of a module while the context lasts."""
        path = self.root / module
        before, status = path.read_bytes(), path.stat()
        path.write_text(source)
        # Python matches bytecode by size and whole seconds: each mutant gets a new second.
        mtime_s = next(self._mtimes_s)
        os.utime(path, (mtime_s, mtime_s))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def pytest(self, file: str, timeout_s: float) -> int | None:
        """Run a file of tests; return the exit status, or None if it took too long."""
        return self._run([*_PYTEST.split(), file], timeout_s)

    def measure(self, file: str, sources: Sequence[str]) -> dict[str, list[int]]:
        """Return the lines by module that a file of tests runs; raise RuntimeError if it fails."""
        report = self._scratch / "coverage.json"
        data = f"--data-file={self._scratch / 'coverage'}"
        source = f"--source={','.join(sources)}"
        words = ["-m", "coverage", "run", data, source, *_PYTEST.split(), file]
        if self._run(words, _MEASURE_TIMEOUT_S) not in (0, _NO_TESTS):
            output = (self._scratch / "output.txt").read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{output}\ncould not be measured: {file}")
        words = ["-m", "coverage", "json", data, "-q", "-o", str(report)]
        if self._run(words, _MEASURE_TIMEOUT_S):
            return {}  # no line ran
        files = json.loads(report.read_text())["files"]
        return {name: one["executed_lines"] for name, one in files.items()}

    def close(self) -> None:
        """Stop the current run and discard its result."""
        self._closed = True
        self._stop()

    def _run(self, words: Sequence[str], timeout_s: float) -> int | None:
        if self._closed:
            raise TreeClosed
        scripts = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        hypothesis = str(self._scratch / "hypothesis")
        own = {"PATH": scripts, "PYTHONPATH": str(self.root)}
        with (self._scratch / "output.txt").open("wb") as output:
            self._running = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.root,
                env={**os.environ, **own, "HYPOTHESIS_STORAGE_DIRECTORY": hypothesis},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._running.wait(timeout_s)
        self._stop()
        if self._closed:
            raise TreeClosed
        return status

    def _stop(self) -> None:
        """Stop the running process and its children, with a grace period."""
        process = self._running
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def project_files(root: Path) -> list[str]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [name for name in output.split("\0") if name and (root / name).is_file()]


def test_files(root: Path, paths: Sequence[str]) -> list[str]:
    """Return the test files; raise ValueError for a path without tests."""
    found: list[str] = []
    for name in paths:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        if not files:
            raise ValueError(f"no tests in {name}")
        found.extend(file.relative_to(root).as_posix() for file in files)
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class Lines:
    """Which files of tests run which lines; a line that runs at import counts for all of them."""

    root: Path
    path: Path
    """The file that keeps what was measured, by the digest of each file of tests."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def load(self, files: Sequence[str]) -> list[str]:
        """Read what was measured before; return the files that are to be measured."""
        kept = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.measured = {
            file: kept[file]
            for file in files
            if file in kept and kept[file]["digest"] == self.digest(file)
        }
        return [file for file in files if file not in self.measured]

    def measure(self, file: str, tree: Tree, sources: Sequence[str]) -> None:
        """Measure a file of tests, and keep the result."""
        began_s = time.monotonic()
        lines = tree.measure(file, sources)
        took_s = time.monotonic() - began_s
        one = {"digest": self.digest(file), "seconds": took_s, "lines": lines}
        with self._lock:  # the trees have a thread each
            self.measured[file] = one
            self.path.write_text(json.dumps(self.measured))

    def digest(self, file: str) -> str:
        """Return a digest of a file of tests."""
        return hashlib.sha256((self.root / file).read_bytes()).hexdigest()[:16]

    def tests(self, module: str, line: int, budget_s: float) -> list[str]:
        """Return the files of tests that run a line, the fastest first, within a budget."""
        running = [
            (one["seconds"], file)
            for file, one in self.measured.items()
            if line in one["lines"].get(module, ())
        ]
        total_s = 0.0
        chosen: list[str] = []
        for seconds, file in sorted(running):
            total_s += seconds
            if chosen and total_s > budget_s:
                break
            chosen.append(file)
        return chosen
