"""Copies of the project's files, in which mutants are tried."""

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
class Ended:
    """How a run of pytest ended."""

    status: int | None
    """None if it was stopped because its time was over."""
    result: dict[str, Any] | None
    output: str


class Tree:
    """A copy of the tree, and the runs of pytest in it, one at a time."""

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
        """Put another source in place of a module."""
        path = self.root / module
        before, status = path.read_bytes(), path.stat()
        path.write_text(source)
        # Bytecode is found by size and whole seconds: give each mutant seconds of its own.
        moment_s = next(self._mtimes_s)
        os.utime(path, (moment_s, moment_s))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def pytest(self, plan: dict[str, Any], *, timeout_s: float) -> Ended:
        """Run pytest in a process of its own; raise TreeClosed if the tree is closed meanwhile."""
        if self._closed:
            raise TreeClosed
        plan_file, result_file = self._scratch / "plan.json", self._scratch / "result.json"
        output_file = self._scratch / "output.txt"
        result_file.unlink(missing_ok=True)
        # pytest empties the folder for temporary files itself.
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
        return Ended(
            status=status, result=result, output=output_file.read_text(errors="replace")[-4000:]
        )

    def close(self) -> None:
        """End what runs, so that its result does not count."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        """End the running process and its children; it first gets time to end them itself."""
        running = self._running
        if running is None:
            return
        if running.poll() is None:
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()

    def _environment(self) -> dict[str, str]:
        scripts = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": os.pathsep.join((scripts, os.environ.get("PATH", ""))),
            "PYTHONPATH": str(self.root),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._scratch / "hypothesis"),
        }


def project_files(root: Path) -> list[str]:
    """List the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (root / name).is_file()]
