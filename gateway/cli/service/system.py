"""What launchd and systemd get, and how a command calls them."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from gateway.cli import CommandError

NAME = "paceline"
RESTART_DELAY_S = 10
LONGEST_STOP_S = 3600
"""The longest shutdown that a system waits for."""


class Job(NamedTuple):
    """What the system runs."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_s: int  # from SIGTERM to SIGKILL


def call(*command: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command of the system; raise `CommandError` with its message if it fails."""
    line, timeout_s = " ".join(command), LONGEST_STOP_S + RESTART_DELAY_S
    try:
        done = subprocess.run(  # noqa: S603  # our own words
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        raise CommandError(f"This machine has no command `{line}`, or it does not end.") from None
    if done.returncode and not may_fail:
        problem = done.stderr.partition("\n")[0] or f"exit code {done.returncode}"
        raise CommandError(f"`{line}` failed: {problem[:500]}")
    return done
