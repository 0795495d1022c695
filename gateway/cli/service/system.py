"""The common part of the services of launchd and systemd."""

from __future__ import annotations

import os
import subprocess

from gateway.cli import CommandError

NAME = "paceline"
RESTART_DELAY_S = 10
LONGEST_STOP_S = 3600
"""The longest shutdown that a system waits for."""


def sudo_account() -> str:
    """Return the account that has become root by sudo; empty without sudo."""
    return "" if os.geteuid() else os.environ.get("SUDO_USER", "")


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
        raise CommandError(f"The command `{line}` is missing here, or does not end.") from None
    if done.returncode and not may_fail:
        problem = done.stderr.partition("\n")[0] or f"exit code {done.returncode}"
        raise CommandError(f"`{line}` failed: {problem[:500]}")
    return done
