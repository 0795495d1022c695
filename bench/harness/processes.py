"""Processes of a benchmark: their environment, their ports and their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

_STOP_TIMEOUT_S = 30.0


def inherited() -> dict[str, str]:
    """Return this environment without Paceline settings of this machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a process that leads a session, and all its children."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):  # remaining processes of its session
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
