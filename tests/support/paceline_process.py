"""`paceline` processes for tests: started, read and stopped."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tests.support.paceline_forks import PacelineFork
from tests.support.worker_process import environment_without_paceline

LISTENS = r"listens on (http://\S+?)\.?$"
STARTED = r"^Worker started \(process (\d+)\)"
READY = r"^Paceline is ready on (\S+) \(model (\S+)\)"
READY_AGAIN = r"^The worker is ready again"
TIMEOUT_S = 240.0
"""Of a process on a busy machine, where a worker may take minutes to start."""


class PacelineProcess:
    """A running `paceline` command and its output so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._output_changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, *, times: int = 1) -> re.Match[str]:
        """Return the first (or nth) match of the pattern in a line of output; wait for it."""
        with self._output_changed:
            matches: list[re.Match[str]] = []
            self._output_changed.wait_for(
                lambda: len(self._matches(pattern, matches)) >= times or self._ended, TIMEOUT_S
            )
        assert len(matches) >= times, f"no line matches {pattern!r}:\n" + "\n".join(self.lines)
        return matches[times - 1]

    def wait_for_end(self) -> int:
        """Return the exit code after the process has ended and all output is read."""
        exit_code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return exit_code

    def _matches(self, pattern: str, matches: list[re.Match[str]]) -> list[re.Match[str]]:
        matches[:] = [match for line in self.lines if (match := re.search(pattern, line))]
        return matches

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):  # on Linux, the end of a terminal
            for line in self.process.stdout:
                with self._output_changed:
                    self.lines.append(line.rstrip("\n"))
                    self._output_changed.notify_all()
        with self._output_changed:
            self._ended = True
            self._output_changed.notify_all()


class UpProcess(PacelineProcess):
    """A running `paceline up` whose worker is ready."""

    def __init__(self, process: subprocess.Popen[str], state_dir: Path) -> None:
        super().__init__(process)
        self.state_dir = state_dir
        ready = self.wait_for(READY)
        self.url, self.model = ready[1], ready[2]

    def worker_pid(self, boot: int = 1) -> int:
        return int(self.wait_for(STARTED, times=boot)[1])

    def workers(self) -> list[dict[str, str]]:
        headers = {"authorization": f"Bearer {(self.state_dir / 'admin-key').read_text()}"}
        response = httpx.get(
            f"{self.url}/admin/v1/workers", headers=headers, timeout=60
        ).raise_for_status()
        return response.json()["workers"]


@contextlib.contextmanager
def start_paceline(
    *arguments: str, environment: Mapping[str, str], folder: Path, terminal: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Start `paceline ARGUMENTS` in a new folder; stop it at the end of the context.

    It prints into a pipe, or to a terminal.
    """
    output = subprocess.PIPE
    if terminal:
        screen, output = os.openpty()
    process = PacelineFork(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**process_environment(folder), "TERM": "dumb", **environment},
    )
    if terminal:
        os.close(output)
        process.stdout = os.fdopen(screen)
    with process:
        try:
            yield process
            process.send_signal(signal.SIGINT)  # SIGTERM would drain for a while
            process.wait(TIMEOUT_S)
        finally:
            process.kill()  # before the wait for its end, which may follow a failed test


@contextlib.contextmanager
def running_up(folder: Path, *, terminal: bool = False) -> Iterator[UpProcess]:
    """Run `paceline up` on a free port with the demo model."""
    with start_paceline(
        "up", "--port", "0", environment={}, folder=folder, terminal=terminal
    ) as process:
        yield UpProcess(process, _state_dir(folder))


def process_environment(folder: Path) -> dict[str, str]:
    """Return this environment without Paceline settings of this machine."""
    root = str(Path(__file__).parents[2])
    return environment_without_paceline() | {
        "PACELINE_STATE_DIR": str(_state_dir(folder)),
        "PYTHONPATH": root,
    }


def _state_dir(folder: Path) -> Path:
    return folder / "state"


@contextlib.contextmanager
def connection_to(url: str) -> Iterator[socket.socket]:
    """Open a connection to a process; a read returns nothing after the process has ended."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.settimeout(TIMEOUT_S)
        yield connection
