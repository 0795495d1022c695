"""What a process and all its children have cost so far: CPU time, and the memory they hold."""

from __future__ import annotations

import subprocess
import sys
import time


def cpu_s(process_id: int) -> float:
    """Add up the CPU seconds of a process and its living children."""
    if sys.platform == "linux":
        # POSIX' CPU clock of another process: nanoseconds, where `ps` tells seconds.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in _family(process_id, "rss"))
    return sum(_seconds(told) for told in _family(process_id, "time").values())


def resident_bytes(process_id: int) -> int:
    """Add up the resident memory of a process and its living children."""
    return sum(int(told) * 1024 for told in _family(process_id, "rss").values())


def _family(process_id: int, field: str) -> dict[int, str]:
    """Map a process and its children to one field of `ps`."""
    listed = subprocess.run(
        ["ps", "-A", "-o", f"pid=,ppid=,{field}="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    family = {process_id}
    while grown := {int(pid) for pid, parent, _ in rows if int(parent) in family} - family:
        family |= grown
    return {int(pid): told for pid, _, told in rows if int(pid) in family}


def _seconds(told: str) -> float:
    """Read `ps`' CPU time, [[days-]hours:]minutes:seconds.hundredths."""
    days, _, clock = told.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86400 * int(days or 0)
