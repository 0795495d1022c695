"""Keep one worker child alive: start it, show what it says, start it again, end it."""

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

from gateway.supervision import Death, GiveUp, Supervision
from workers.adapters.process import READY_PREFIX

STOP_GRACE_S = 10.0
LAST_WORDS_S = 1.0
_LINE_ENDS = re.compile(rb"[\r\n]+")  # progress bars end their lines with a return
_CHUNK_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """How the one worker of `paceline up` is started, and who hears of it."""

    command: Sequence[str]
    environment: Mapping[str, str]
    """Added to our own."""
    on_ready: Callable[[Mapping[str, Any]], Coroutine[Any, Any, None]]
    """Called in each life that gets so far, with what the worker says of itself; ends with it."""
    on_death: Callable[[], Awaitable[None]]
    """Called before it is started again."""
    say: Callable[[str], None]
    show_line: Callable[[str], None]
    """Gets every other line that the worker writes."""
    supervision: Supervision = field(default_factory=Supervision)

    async def run(self) -> GiveUp:
        """Keep the worker alive until that is hopeless; cancelling ends the worker first."""
        supervision = self.supervision
        while True:
            death = await self._one_life()
            supervision, next_step = supervision.after(death)
            if isinstance(next_step, GiveUp):
                return next_step
            self.say(
                f"The worker {_cause(death.exit_code)}; "
                f"starting it again in {next_step.wait_s:g} s."
            )
            await self.on_death()
            await asyncio.sleep(next_step.wait_s)

    async def _one_life(self) -> Death:
        started_mono_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=PIPE,  # the leash: it closes when this process ends, however it ends
            stdout=PIPE,
            stderr=STDOUT,
            env={**os.environ, **self.environment},
            start_new_session=True,  # Ctrl-C is for the gateway: streams end before the worker does
        )
        self.say(f"Worker started (process {process.pid}).")
        output = asyncio.create_task(self._follow(process.stdout), name="worker-output")
        try:
            exit_code = await process.wait()
        finally:
            await _end(process)
            # Its last words; bounded, because something it started may hold the pipe open.
            heard, _ = await asyncio.wait({output}, timeout=LAST_WORDS_S)
            output.cancel()
        return Death(
            started_mono_s=started_mono_s,
            died_mono_s=time.monotonic(),
            exit_code=exit_code,
            was_ready=bool(heard) and output.result(),
        )

    async def _follow(self, output: asyncio.StreamReader | None) -> bool:
        """Pass on what the worker writes to its end; return whether it ever was ready."""
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
                        self.show_line(text)
        finally:
            if greeting is not None:
                greeting.cancel()
        return greeting is not None


def _cause(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"


async def _end(process: Process) -> None:
    """End the worker: ask, wait, then insist; one that has ended is left alone."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
