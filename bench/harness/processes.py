"""Processes of a benchmark: their environment, their ports and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_STOP_TIMEOUT_S = 30.0
CORES: Final = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
"""The processor cores of this process, as far as a system has processes choose them."""


def keep_to(cores: Sequence[int], process_id: int | str = "self") -> None:
    """Let a process, and what it starts from now on, run on these cores only, if there are any."""
    if cores and sys.platform == "linux":
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def inherited() -> dict[str, str]:
    """Return this environment without Paceline settings of this machine.

    All workers keep their compiled kernels in one folder.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {"TMPDIR": tempfile.gettempdir(), **own}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def start(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a process that leads a session; `end` ends it, also when SIGTERM ends this process."""
    exit_at_sigterm()
    return await asyncio.create_subprocess_exec(*command, start_new_session=True, **options)


def exit_at_sigterm() -> None:
    """Let SIGTERM raise `SystemExit`, so that each block that has started a process ends it."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a process that leads a session, and all its children."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    kill_session(process.pid)
    await process.wait()


def kill_session(leader_id: int) -> None:
    """Kill what runs of the session that a process leads or has led."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader_id, signal.SIGKILL)
