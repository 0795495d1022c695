"""Worker processes for tests: start, wait until ready, stop."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.protocol import READY_PREFIX
from workers.demo import CHECKPOINT

STOP_TIMEOUT_S = 60
SUPPRESS_END_TOKENS = {"0": -100, "2": -100}
"""A logit_bias: without these tokens the demo model ends no completion before its limit."""


def byte_token(byte: int) -> int:
    """Return the token of the demo checkpoint for one byte of 0xA1 or above."""
    vocabulary = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"]["vocab"]
    return int(vocabulary[chr(byte)])


@dataclass(frozen=True, kw_only=True)
class RunningWorker:
    """A ready worker, in a process of its own or in that of the tests."""

    url: str
    worker_id: str
    model: str
    lanes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WorkerProcess(RunningWorker):
    """A ready worker process; `start_lines` is its output before the ready line."""

    start_lines: tuple[str, ...]
    process: subprocess.Popen[str]


@contextmanager
def running_worker(
    *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[WorkerProcess]:
    """Run `python -m workers` with the demo checkpoint on a free port."""
    with worker_process(
        "--model", str(CHECKPOINT), "--port", "0", *flags, environment=environment
    ) as process:
        yield wait_until_ready(process)


@contextmanager
def worker_process(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start `python -m workers`, and kill it at the end of the context."""
    with subprocess.Popen(
        [sys.executable, "-m", "workers", *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={
            **environment_without_paceline(),
            "PACELINE_WORKER_PREFIX_CACHE_GB": "0",  # no conversation of a test stays on disk
            **(environment or {}),
        },
    ) as process:
        try:
            yield process
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()  # `Popen.__exit__` would wait without a limit


def wait_until_ready(process: subprocess.Popen[str]) -> WorkerProcess:
    """Read the output of a worker up to its ready line; fail if it ends before."""
    assert process.stdout is not None
    start_lines: list[str] = []
    for line in process.stdout:
        if line.startswith(READY_PREFIX):
            ready = json.loads(line.removeprefix(READY_PREFIX))
            return WorkerProcess(
                url=ready["url"],
                worker_id=ready["worker_id"],
                model=ready["model"],
                lanes=tuple(ready["lanes"]),
                start_lines=tuple(start_lines),
                process=process,
            )
        start_lines.append(line.rstrip("\n"))
    raise AssertionError(f"the worker ended with code {process.wait()} before it was ready")


def run_worker(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m workers` until it exits; capture its output."""
    return subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STOP_TIMEOUT_S,
        env={**environment_without_paceline(), **(environment or {})},
        check=False,
    )


def environment_without_paceline() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
