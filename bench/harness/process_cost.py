"""CPU time and memory of a process and its children."""

from __future__ import annotations

import subprocess
import sys
import time


def cpu_s(process_id: int) -> float:
    if sys.platform == "linux":
        # The POSIX CPU clock of another process has nanoseconds; `ps` has seconds.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in _family(process_id, "rss"))
    return sum(_seconds(value) for value in _family(process_id, "time").values())


def resident_bytes(process_id: int) -> int:
    """Return the resident memory of a process and its live children."""
    return sum(int(value) * 1024 for value in _family(process_id, "rss").values())


def _family(process_id: int, field: str) -> dict[int, str]:
    listed = subprocess.run(
        ["ps", "-A", "-o", f"pid=,ppid=,{field}="], capture_output=True, text=True, check=True
    )
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    family = {process_id}
    while children := {int(pid) for pid, parent, _ in rows if int(parent) in family} - family:
        family |= children
    return {int(pid): value for pid, _, value in rows if int(pid) in family}


def _seconds(value: str) -> float:
    """Parse the CPU time of `ps`, [[days-]hours:]minutes:seconds.hundredths."""
    days, _, clock = value.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86400 * int(days or 0)
