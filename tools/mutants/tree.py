"""Copies of the project's files, in which mutants run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_S = 5.0
_MTIME_S = 1_000_000_000


class TreeClosed(Exception):
    """The tree was closed while pytest ran in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PytestRun:
    """The result of a run of pytest."""

    status: int | None
    """None after a timeout."""
    result: dict[str, Any] | None
    output: str


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

    def pytest(self, plan: dict[str, Any], *, timeout_s: float) -> PytestRun:
        """Run pytest in a process; raise TreeClosed if the tree is closed during the run."""
        if self._closed:
            raise TreeClosed
        plan_file, result_file = self._scratch / "plan.json", self._scratch / "result.json"
        output_file = self._scratch / "output.txt"
        result_file.unlink(missing_ok=True)
        # pytest clears the folder for temporary files.
        plan["arguments"] = [*plan["arguments"], f"--basetemp={self._scratch / 'tmp'}"]
        plan_file.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "tools.mutants.child", str(plan_file), str(result_file)]
        with output_file.open("wb") as output:
            self._running = subprocess.Popen(
                command,
                cwd=self.root,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status: int | None = self._running.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self._stop()
        if self._closed:
            raise TreeClosed
        result = json.loads(result_file.read_text()) if result_file.exists() else None
        return PytestRun(
            status=status, result=result, output=output_file.read_text(errors="replace")[-4000:]
        )

    def close(self) -> None:
        """Stop the current run and discard its result."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        """Stop the running process and its children, with a grace period."""
        process = self._running
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _environment(self) -> dict[str, str]:
        scripts = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": os.pathsep.join((scripts, os.environ.get("PATH", ""))),
            "PYTHONPATH": str(self.root),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._scratch / "hypothesis"),
        }


def project_files(root: Path) -> list[str]:
    """Return the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [name for name in output.split("\0") if name and (root / name).is_file()]
