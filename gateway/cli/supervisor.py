"""Supervision of the worker child of `paceline up`: start, restart, stop.

`Supervision` decides about restarts and is pure; `Supervisor` runs the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from paceline.protocol import READY_PREFIX, START_PREFIX, ExitCode, StartProgress

REFUSALS = frozenset((ExitCode.SETTINGS, ExitCode.MODEL, ExitCode.NOT_ADMITTED))
"""Exit codes of a worker that would fail again: settings, model, join token."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
RESET_AFTER_S = 60.0
"""A process that ran this long resets the delay."""
GIVE_UP_AFTER = 5
"""The supervisor gives up after this many exits in a row if the worker was never ready."""
STOP_GRACE_S = 10.0
OUTPUT_GRACE_S = 1.0
_LINE_ENDS = re.compile(rb"[\r\n]+")  # progress bars end their lines with a return
_CHUNK_BYTES = 8192


@dataclass(slots=True)
class Supervision:
    """The exits so far, and the decision: a restart, or the end."""

    exits_in_a_row: int = 0
    ever_ready: bool = False
    give_up_reason: str = ""
    """Not empty: the worker is not restarted."""

    @property
    def wait_s(self) -> float:
        """Return the delay of the next restart; it doubles with each exit in a row."""
        doublings = min(self.exits_in_a_row - 1, 10)  # later ones exceed the longest delay
        return min(FIRST_WAIT_S * 2.0**doublings, LONGEST_WAIT_S)

    def record_exit(self, exit_code: int, *, uptime_s: float, was_ready: bool) -> None:
        """Count an exit; a negative code is the number of a signal, as in `subprocess`."""
        self.ever_ready |= was_ready
        settled = was_ready and uptime_s >= RESET_AFTER_S
        self.exits_in_a_row = 1 if settled else self.exits_in_a_row + 1
        if not self.ever_ready and exit_code in REFUSALS:
            self.give_up_reason = "the worker cannot start; see its message above"
        elif not self.ever_ready and self.exits_in_a_row >= GIVE_UP_AFTER:
            self.give_up_reason = (
                f"the worker exited {self.exits_in_a_row} times before it was ready"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """Runs the one worker of `paceline up`."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Added to the environment of this process."""
    on_ready: Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]
    """Called when a worker process is ready, with its ready line; cancelled when it exits."""
    on_exit: Callable[[], Awaitable[None]]
    """Called before a restart."""
    on_progress: Callable[[StartProgress | None], None]
    """Called while a worker process starts, and with None at the end of its start."""
    print_line: Callable[[str], None]
    print_worker_line: Callable[[str], None]
    """Called for every other line of the worker's output."""

    async def run(self) -> str:
        """Run and restart the worker; return the reason why it is not restarted.

        Cancellation stops the worker first.
        """
        supervision = Supervision()
        while True:
            exit_code = await self._run_once(supervision)
            if supervision.give_up_reason:
                return supervision.give_up_reason
            cause = f"ended with code {exit_code}"
            if exit_code < 0:
                cause = f"was killed by signal {-exit_code}"
            self.print_line(f"The worker {cause}; it restarts in {supervision.wait_s:g} s.")
            await self.on_exit()
            await asyncio.sleep(supervision.wait_s)

    async def _run_once(self, supervision: Supervision) -> int:
        started_mono_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=PIPE,  # closes when this process ends, however it ends; the worker then exits
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, **self.environment},
            start_new_session=True,  # Ctrl-C is for the gateway: streams end before the worker does
        )
        self.print_line(f"Worker started (process {process.pid}).")
        output = asyncio.create_task(self._follow(process.stdout), name="worker-output")
        try:
            exit_code = await process.wait()
        finally:
            self.on_progress(None)
            await _stop(process)
            # The rest of its output; bounded, because a grandchild may keep the pipe open.
            finished, _ = await asyncio.wait({output}, timeout=OUTPUT_GRACE_S)
            output.cancel()
        supervision.record_exit(
            exit_code,
            uptime_s=time.monotonic() - started_mono_s,
            was_ready=bool(finished) and output.result(),
        )
        return exit_code

    async def _follow(self, output: asyncio.StreamReader | None) -> bool:
        """Forward the worker's output until it ends; return whether the worker was ever ready."""
        greeting: asyncio.Task[None] | None = None
        rest = b""
        try:
            while output and (chunk := await output.read(_CHUNK_BYTES)):
                *lines, rest = _LINE_ENDS.split(rest + chunk)
                for line in lines:
                    text = line.decode(errors="replace").rstrip()
                    if text.startswith(READY_PREFIX):
                        self.on_progress(None)
                        ready = json.loads(text.removeprefix(READY_PREFIX))
                        greeting = asyncio.create_task(self.on_ready(ready), name="worker-ready")
                    elif text.startswith(START_PREFIX):
                        with contextlib.suppress(ValidationError):  # of two lines at once
                            told = text.removeprefix(START_PREFIX)
                            self.on_progress(StartProgress.model_validate_json(told))
                    elif text:
                        self.print_worker_line(text)
        finally:
            if greeting is not None:
                greeting.cancel()
        return greeting is not None


async def _stop(process: Process) -> None:
    """Stop the worker: terminate, wait, kill."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
