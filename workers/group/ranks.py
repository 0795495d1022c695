"""The ranks of a group as processes: start, checks, signs of life, and one end for all.

A rank on this machine is a child; one on another machine is a child of its sshd, which closes the
standard input of the rank with the connection. `mlx.launch` is not used: it needs ssh for every
host, takes half a core, and does not notice that a rank was killed.
"""

import asyncio
import contextlib
import json
import logging
import shlex
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from workers.group.hosts import Hosts
from workers.group.rank import RankFacts, RankMessage, RankOrder, RankRequest, RankStart
from workers.settings import Split

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""A rank beats every second; after this silence it hangs, sleeps or is cut off."""
START_SILENCE_S = 30.0
"""The same while it imports libraries and loads."""
_CHECK_S = 0.25
_PAUSE_S = 2.0
_END_S = 5.0
_LINE_BYTES = 1 << 20
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_MODULE = "workers.group.rank"

_Result = TypeVar("_Result")


class RankRefused(Exception):
    """The ranks cannot form a group; the sentence is for the person who starts it."""


class RanksDied(Exception):
    """A rank has ended, or gives no sign of life, and so the group has; the text is for the log."""


@dataclass(slots=True)
class _Rank:
    name: str
    process: Process
    ssh: str
    facts: asyncio.Future[RankFacts]
    heard_s: float
    memory_bytes: int = 0


@dataclass(eq=False)
class Ranks:
    """The running ranks of one group, from their start to their common end."""

    hosts: Hosts
    on_answer: Callable[[RankMessage], None]
    """Called with each message of an answer."""
    patience_s: Callable[[], float | None]
    """Returns how long the running answers may make no progress; None if none runs."""
    _ranks: list[_Rank] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _started: bool = False
    _progress_s: float = 0.0
    """Time of the last message of an answer, or of the first request after all had ended."""

    def __post_init__(self) -> None:
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def launch(self, model: str) -> Sequence[RankFacts]:
        """Start all ranks and return their facts; raise `RankRefused` or `RanksDied`."""
        for rank, host in enumerate(self.hosts.hosts):
            command = [sys.executable, "-P", "-m", _MODULE]
            ssh = "" if host.is_local else host.ssh
            if ssh:
                command = [*_SSH, "--", ssh, shlex.join(command)]
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,  # closes when this process ends, however it ends; the rank then exits
                stdout=PIPE,
                limit=_LINE_BYTES,
                start_new_session=True,  # Ctrl-C is for the worker: answers end before the ranks do
            )
            loop = asyncio.get_running_loop()
            one = _Rank(self.hosts.name_of(rank), process, ssh, loop.create_future(), loop.time())
            self._ranks.append(one)
            self._tasks.append(asyncio.create_task(self._read(one), name=f"rank-{rank}"))
            order = RankOrder(rank=rank, model=model, addresses=host.ips)
            self._write(one, order.model_dump_json())
        self._tasks.append(asyncio.create_task(self._watch(), name="ranks"))
        return await self._unless_dead(asyncio.gather(*(one.facts for one in self._ranks)))

    def begin(self, split: Split, facts: Sequence[RankFacts], rows: int) -> None:
        """Let the ranks load their parts and connect."""
        variables, files = self.hosts.environment([one.ports for one in facts])
        start = RankStart(
            backend=self.hosts.backend, split=split, variables=variables, files=files, rows=rows
        )
        for one in self._ranks:
            self._write(one, start.model_dump_json())

    async def first_token(self, token: asyncio.Future[None], limit_s: float) -> None:
        """Wait for the first token of all ranks; raise `RanksDied`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._unless_dead(token)
        except TimeoutError:
            raise RanksDied(f"no first token within {limit_s:g} s") from None
        self._started = True

    async def wait(self) -> None:
        """Wait for the end of the group: raises `RanksDied`."""
        await asyncio.shield(self._death)

    def submit(self, request: RankRequest) -> None:
        """Send a request to rank 0, before it counts as running; its answer comes as messages."""
        if self.patience_s() is None:
            self._progress_s = asyncio.get_running_loop().time()
        self._write(self._ranks[0], request.model_dump_json(exclude_defaults=True))

    def cancel(self, number: int) -> None:
        """Take a row out of the batch. A request that runs by itself must be read to its end."""
        self._write(self._ranks[0], json.dumps({"cancel": number}))

    @property
    def memory_bytes(self) -> int:
        """Memory in use by MLX on all ranks."""
        return sum(one.memory_bytes for one in self._ranks)

    def kill(self) -> None:
        """Kill all ranks; a stopped one too."""
        for one in self._ranks:
            if one.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    one.process.kill()

    async def close(self) -> None:
        """Kill all ranks and wait for their ends."""
        for task in self._tasks:
            task.cancel()
        self.kill()
        ends = [self._end(one) for one in self._ranks]
        await asyncio.gather(*ends, *self._tasks, return_exceptions=True)

    async def _end(self, one: _Rank) -> None:
        if one.ssh and one.facts.done() and not one.facts.exception():
            # A rank that is stopped does not notice that its input has closed.
            kill = await asyncio.create_subprocess_exec(
                *_SSH, "--", one.ssh, f"kill -9 {one.facts.result().pid}"
            )
            try:
                async with asyncio.timeout(_END_S):
                    await kill.wait()
            except TimeoutError:
                kill.kill()
        async with asyncio.timeout(_END_S):
            await one.process.wait()

    async def _unless_dead(self, awaited: asyncio.Future[_Result]) -> _Result:
        both: set[asyncio.Future[Any]] = {awaited, self._death}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not awaited.done():
            awaited.cancel()
            self._death.result()
        return awaited.result()

    def _write(self, one: _Rank, line: str) -> None:
        assert one.process.stdin is not None
        one.process.stdin.write(line.encode() + b"\n")

    async def _read(self, one: _Rank) -> None:
        """Read the lines of a rank up to its end."""
        assert one.process.stdout is not None
        try:
            while line := await one.process.stdout.readline():
                self._take(one, RankMessage.model_validate_json(line))
        except (ValueError, ValidationError):  # a line that is too long is a ValueError
            self._die(f"{one.name} wrote a line that is no message")
            return
        except Exception:  # whatever a message causes: without its answer the group cannot go on
            log.exception("group.message_failed")
            self._die("a message of an answer could not be read")
            return
        code = await one.process.wait()
        cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._die(f"{one.name} {cause}")

    def _take(self, one: _Rank, message: RankMessage) -> None:
        one.heard_s = asyncio.get_running_loop().time()
        if message.beat_bytes is not None:
            one.memory_bytes = message.beat_bytes
        elif message.facts is not None and not one.facts.done():
            one.facts.set_result(message.facts)
        elif message.refusal and not one.facts.done():
            one.facts.set_exception(RankRefused(f"{one.name}: {message.refusal.rstrip('.')}."))
        elif message.id:
            self._progress_s = one.heard_s
            self.on_answer(message)

    async def _watch(self) -> None:
        """End the group if a rank gives no sign of life, or an answer none of progress."""
        loop = asyncio.get_running_loop()
        checked_s = loop.time()
        while True:
            await asyncio.sleep(_CHECK_S)
            limit_s = SILENCE_S if self._started else START_SILENCE_S
            now_s = loop.time()
            if now_s - checked_s > _PAUSE_S:  # this process itself slept, and has read nothing yet
                self._progress_s = now_s
                for one in self._ranks:
                    one.heard_s = now_s
            checked_s = now_s
            for one in self._ranks:
                if now_s - one.heard_s > limit_s:
                    self._die(f"{one.name} gave no sign of life for {limit_s:g} s")
            patience_s = self.patience_s()
            if self._started and patience_s is not None and now_s - self._progress_s > patience_s:
                self._die(f"the ranks made no token in {patience_s:g} s")

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_exception(RanksDied(reason))
            self._death.exception()  # retrieved: nobody may wait
