"""The supervisor of the worker of `paceline up`, with a process that only prints."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.cli import supervisor
from workers.protocol import READY_PREFIX


async def test_a_starting_worker_shows_signs_of_life_until_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "_SIGN_OF_LIFE_S", 0.05)
    lines: list[str] = []
    starting = "The worker is still starting, "
    told, ready = asyncio.Event(), asyncio.Event()

    def print_line(line: str) -> None:
        lines.append(line)
        if line.startswith(starting):
            told.set()

    async def on_ready(_: Mapping[str, Any]) -> None:
        ready.set()

    async def on_exit() -> None:
        """Do nothing."""

    # Its input stays open until it is stopped.
    program = f"import time; time.sleep(1); print('{READY_PREFIX}{{}}', flush=True); input()"
    running = asyncio.create_task(
        supervisor.Supervisor(
            command=(sys.executable, "-c", program),
            environment={},
            on_ready=on_ready,
            on_exit=on_exit,
            print_line=print_line,
            print_worker_line=lines.append,
        ).run()
    )
    async with asyncio.timeout(30):
        await told.wait()
        await ready.wait()
    count = len(lines)
    await asyncio.sleep(0.2)  # four more signs, if they went on
    assert len(lines) == count
    running.cancel()
    await asyncio.wait({running})
