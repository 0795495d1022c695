"""An agent for coding as a command that takes its question from standard input."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.clients.cases import KEY, SLOWLY, leave, requests_running, wait_until
from bench.harness.processes import exit_at_sigterm, kill_session


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent, whose home is this folder; `PACELINE_KEY` has its API key."""

    command: tuple[str, ...]
    timeout_s: float

    def ask(self, question: str, key: str = KEY) -> str:
        """Return what the agent prints."""
        with self._running(question, key) as process:
            return process.communicate(timeout=self.timeout_s)[0]

    def interrupt(self) -> str:
        """Interrupt the agent while the worker answers; return what the gateway counts."""

        def interrupt() -> None:
            with self._running(SLOWLY, KEY) as process:
                wait_until(lambda: requests_running() > 0)
                os.killpg(process.pid, signal.SIGINT)
                process.communicate(timeout=self.timeout_s)

        return leave(interrupt)

    @contextlib.contextmanager
    def _running(self, question: str, key: str) -> Iterator[subprocess.Popen[str]]:
        exit_at_sigterm()
        process = subprocess.Popen(
            self.command,
            env={"PATH": os.environ["PATH"], "HOME": str(Path.home()), "PACELINE_KEY": key},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(question)
        process.stdin.close()
        process.stdin = None
        try:
            yield process
        finally:
            kill_session(process.pid)
            process.wait()
