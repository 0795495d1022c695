"""The supervisor of the worker of `paceline up`, with a process that only prints."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from gateway.cli.supervisor import Supervisor
from workers.protocol import READY_PREFIX, START_PREFIX, StartProgress, StartStage


async def test_the_stages_of_a_start_are_passed_on_until_the_worker_is_ready() -> None:
    """A line that is no progress is left out, and the other output is printed."""
    lines: list[str] = []
    steps: list[StartProgress | None] = []
    ready = asyncio.Event()

    async def on_ready(_: Mapping[str, Any]) -> None:
        ready.set()

    async def on_exit() -> None:
        """Do nothing."""

    progress = StartProgress(stage=StartStage.KERNELS, done=1, total=3)
    output = (START_PREFIX + progress.model_dump_json(), START_PREFIX + "{", "a line", READY_PREFIX)
    # Its input stays open until it is stopped.
    program = f"print(*{output!r}, sep='\\n', end='{{}}\\n', flush=True); input()"
    running = asyncio.create_task(
        Supervisor(
            command=(sys.executable, "-c", program),
            environment={},
            on_ready=on_ready,
            on_exit=on_exit,
            on_progress=steps.append,
            print_line=lambda _: None,
            print_worker_line=lines.append,
        ).run()
    )
    async with asyncio.timeout(30):
        await ready.wait()
    assert (steps, lines) == ([progress, None], ["a line"])
    running.cancel()
    await asyncio.wait({running})
