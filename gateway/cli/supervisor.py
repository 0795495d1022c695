"""Supervision of the worker child of `paceline up`: start, restart, stop.

`Supervision` decides about restarts and is pure; `Supervisor` runs the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.protocol import READY_PREFIX, ExitCode

REFUSALS = frozenset((ExitCode.SETTINGS, ExitCode.MODEL))
"""Exit codes of a worker that would fail again: invalid settings, an unusable model."""
STOP_GRACE_S = 10.0
OUTPUT_GRACE_S = 1.0
_LINE_ENDS = re.compile(rb"[\r\n]+")  # progress bars end their lines with a return
_CHUNK_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Delays and bounds of restarts."""

    first_wait_s: float = 0.5
    growth: float = 2.0
    longest_wait_s: float = 30.0
    reset_after_s: float = 60.0
    """A process that ran this long resets the delay."""
    give_up_after: int = 5
    """The supervisor gives up after this many exits in a row if the worker was never ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of one worker process."""

    started_mono_s: float
    ended_mono_s: float
    exit_code: int
    """Negative: the number of the signal, as in `subprocess`."""
    was_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Restart the worker after this delay."""

    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not restart the worker."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """The exits so far; each exit returns a new value."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    exits_in_a_row: int = 0
    ever_ready: bool = False

    def after(self, exit_: WorkerExit) -> tuple[Supervision, Restart | GiveUp]:
        """Return the next state and the decision: a restart with a doubling delay, or the end."""
        ever_ready = self.ever_ready or exit_.was_ready
        settled = exit_.ended_mono_s - exit_.started_mono_s >= self.policy.reset_after_s
        exits = 1 if settled and exit_.was_ready else self.exits_in_a_row + 1
        state = Supervision(policy=self.policy, exits_in_a_row=exits, ever_ready=ever_ready)
        if not ever_ready and exit_.exit_code in REFUSALS:
            return state, GiveUp(reason="the worker cannot start; its message is above")
        if not ever_ready and exits >= self.policy.give_up_after:
            return state, GiveUp(reason=f"the worker exited {exits} times before it was ready")
        wait_s = self.policy.first_wait_s * self.policy.growth ** (exits - 1)
        return state, Restart(wait_s=min(wait_s, self.policy.longest_wait_s))


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
    print_line: Callable[[str], None]
    print_worker_line: Callable[[str], None]
    """Called for every other line of the worker's output."""
    supervision: Supervision = field(default_factory=Supervision)

    async def run(self) -> GiveUp:
        """Run and restart the worker until `GiveUp`; cancellation stops the worker first."""
        supervision = self.supervision
        while True:
            exit_ = await self._run_once()
            supervision, next_step = supervision.after(exit_)
            if isinstance(next_step, GiveUp):
                return next_step
            self.print_line(
                f"The worker {_cause(exit_.exit_code)}; it restarts in {next_step.wait_s:g} s."
            )
            await self.on_exit()
            await asyncio.sleep(next_step.wait_s)

    async def _run_once(self) -> WorkerExit:
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
            await _stop(process)
            # The rest of its output; bounded, because a grandchild may keep the pipe open.
            finished, _ = await asyncio.wait({output}, timeout=OUTPUT_GRACE_S)
            output.cancel()
        return WorkerExit(
            started_mono_s=started_mono_s,
            ended_mono_s=time.monotonic(),
            exit_code=exit_code,
            was_ready=bool(finished) and output.result(),
        )

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
                        ready = json.loads(text.removeprefix(READY_PREFIX))
                        greeting = asyncio.create_task(self.on_ready(ready), name="worker-ready")
                    elif text:
                        self.print_worker_line(text)
        finally:
            if greeting is not None:
                greeting.cancel()
        return greeting is not None


def _cause(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"


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
