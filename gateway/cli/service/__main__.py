"""Run `paceline ARGUMENTS` as a service: its output in files that rotate, its exit code as ours.

launchd does not rotate the output of a service.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

from gateway.cli.service import log_file

LOG_BYTES = 10 * 1024 * 1024
OLD_LOGS = 4
_LONGEST_LINE = 65_536
_OUTPUT_GRACE_S = 1.0


def main(folder: str, arguments: Sequence[str]) -> int:
    """Run the command in this folder; return its exit code."""
    log = open_log(log_file(Path.home()))

    def copy() -> None:
        while child.stdout and (line := child.stdout.readline(_LONGEST_LINE)):
            write(log, line.decode(errors="replace").rstrip("\r\n"))

    def tell(event: str) -> None:
        write(log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} The service {event}.")

    command = (sys.executable, "-P", "-m", "gateway", *arguments)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        child = subprocess.Popen(  # noqa: S603  # the words of `paceline service install`
            command, cwd=folder, env=environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )
    except OSError as error:
        tell(f"cannot start in {folder}: {error.strerror}")
        return 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, lambda number, _frame: child.send_signal(number))
    tell(f"starts `paceline {' '.join(arguments)}` (process {child.pid})")
    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    ended = child.wait()
    exit_code = ended if ended >= 0 else 128 - ended
    reader.join(_OUTPUT_GRACE_S)  # bounded, because a grandchild may keep the pipe open
    tell(f"ended with exit code {exit_code}")
    return exit_code


def open_log(path: Path) -> logging.Handler:
    """Return a file that rotates; a full disk costs lines, never the service."""
    logging.raiseExceptions = False
    with contextlib.suppress(OSError):
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
    return logging.handlers.RotatingFileHandler(
        path, maxBytes=LOG_BYTES, backupCount=OLD_LOGS, encoding="utf-8", delay=True
    )


def write(log: logging.Handler, line: str) -> None:
    """Append a line."""
    log.handle(logging.makeLogRecord({"msg": line}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
