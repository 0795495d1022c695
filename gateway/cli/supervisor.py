"""Keep one worker child alive: start it, show what it says, start it again, end it.

When a dead worker is started again, and when it is not worth it.

Pure: the clock comes in with every death, nothing here sleeps or starts a process.
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
"""Exit codes of a worker that would refuse again: settings that cannot work, an unusable model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How patient the supervisor is."""

    first_wait_s: float = 0.5
    growth: float = 2.0
    longest_wait_s: float = 30.0
    settled_after_s: float = 60.0
    """A life this long shows that the worker can run: the waits begin anew."""
    hopeless_after: int = 5
    """This many deaths in a row without having been ready once are enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How one life of the worker ended."""

    started_mono_s: float
    died_mono_s: float
    exit_code: int
    """Negative: the number of the signal that killed it, as `subprocess` says."""
    was_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Start it again after this wait."""

    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not start it again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What is remembered of the lives so far; each death makes a new value."""

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    deaths_in_a_row: int = 0
    ever_ready: bool = False

    def after(self, death: Death) -> tuple[Supervision, Restart | GiveUp]:
        """Decide what follows a death: a wait that doubles up to a bound, or the end."""
        ever_ready = self.ever_ready or death.was_ready
        settled = death.died_mono_s - death.started_mono_s >= self.policy.settled_after_s
        deaths = 1 if settled and death.was_ready else self.deaths_in_a_row + 1
        known = Supervision(policy=self.policy, deaths_in_a_row=deaths, ever_ready=ever_ready)
        if not ever_ready and death.exit_code in REFUSALS:
            return known, GiveUp(reason="the worker refuses to start; its own words are above")
        if not ever_ready and deaths >= self.policy.hopeless_after:
            return known, GiveUp(reason=f"the worker died {deaths} times before it was ready")
        wait_s = self.policy.first_wait_s * self.policy.growth ** (deaths - 1)
        return known, Restart(wait_s=min(wait_s, self.policy.longest_wait_s))


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
