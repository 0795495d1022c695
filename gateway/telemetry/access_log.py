"""The access log: a line of JSON for each request, its way and its times, never a word of it.

Lines gather in memory and a thread writes them, so no request waits for a disk; nor does the end
of the gateway for one that hangs, or for a reader that does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from pydantic_core import to_json

from gateway.errors import StartupError
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Drafts

log = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
_WRITTEN_EVERY_S = 0.25
_LAST_WRITE_S = 2.0
# Some seconds of a busy gateway; a disk that cannot follow for longer must not fill the memory.
_LINES_HELD = 100_000
_NO_DRAFTS = Drafts(0, 0, 0, ())


class AccessLog:
    """An async context: it holds the file, and writes what is left when it ends.

    `target` is a file that is added to, or `-` for standard output. Raise `StartupError` where it
    cannot be opened. A file that was moved away is opened anew, so logs can be rotated.
    """

    def __init__(self, target: str) -> None:
        self._path = None if target == STANDARD_OUTPUT else Path(target).expanduser()
        self._lines: list[bytes] = []
        self._dropped = 0
        self._ending = asyncio.Event()
        self._given_up = False
        """The end has come, and the thread still writes: the file is the thread's to close."""
        self._file = self._opened()

    def write(self, served: RequestRecord, unix_s: float) -> None:
        """Add the line of one request."""
        if len(self._lines) < _LINES_HELD:
            self._lines.append(to_json(line_of(served, unix_s), inf_nan_mode="null"))
        else:
            self._dropped += 1

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._go_on(), name="access log")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ending.set()
        _, unfinished = await asyncio.wait((self._task,), timeout=_LAST_WRITE_S)
        if unfinished:
            log.warning("access_log.unfinished")
            self._task.cancel()
            self._given_up = True
        elif self._path is not None:
            self._file.close()

    async def _go_on(self) -> None:
        """Write all that has gathered, again and again, and a last time at the end."""
        ended = False
        while not ended:
            with contextlib.suppress(TimeoutError):
                ended = await asyncio.wait_for(self._ending.wait(), _WRITTEN_EVERY_S)
            await self._flush()

    async def _flush(self) -> None:
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            await _in_thread(lambda: self._write(b"\n".join(lines) + b"\n"))
        except OSError as error:
            self._dropped += len(lines)
            log.warning("access_log.failed lines=%d error=%s", self._dropped, error.strerror)
        else:
            if self._dropped:
                log.warning("access_log.dropped lines=%d", self._dropped)
            self._dropped = 0

    def _write(self, text: bytes) -> None:
        if self._path is not None and not self._is_there(self._path):
            moved, self._file = self._file, self._path.open("ab", buffering=0)
            moved.close()
        rest = memoryview(text)
        while rest:
            written = self._file.write(rest)
            if written is None:  # of standard output that somebody made non-blocking
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            rest = rest[written:]
        if self._given_up:
            self._file.close()

    def _is_there(self, path: Path) -> bool:
        try:
            return os.path.samestat(path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _opened(self) -> io.FileIO:
        if self._path is None:
            return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
        try:
            return self._path.open("ab", buffering=0)
        except OSError as error:
            raise StartupError(
                f"The access log {self._path} cannot be written ({error.strerror}); name another "
                "file with PACELINE_ACCESS_LOG, or - for standard output."
            ) from None


async def _in_thread(work: Callable[[], None]) -> None:
    """Do this in a thread that the end of the process does not wait for, unlike asyncio's own."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: OSError | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure = None
        try:
            work()
        except OSError as error:
            failure = error
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for it
                loop.call_soon_threadsafe(settle, failure)

    Thread(target=run, name="access log", daemon=True).start()
    await done


def line_of(served: RequestRecord, unix_s: float) -> dict[str, Any]:
    """Say what is told of a request: names of ours and numbers, nothing that a client wrote."""
    candidate, decision, usage = served.candidate, served.decision, served.usage
    drafts = served.drafts or _NO_DRAFTS
    profile = None if served.inspected is None else served.inspected.profile
    return {
        "event": "request.done",
        "time": datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds"),
        "request": served.request_id,
        "key": served.caller.key,
        "endpoint": profile.endpoint.value if profile else "",
        "stream": profile.stream if profile else False,
        "outcome": served.outcome.value,
        "status": served.status,
        "code": served.code,
        # Until a worker was found, a model's name is but a word of the client.
        "model": profile.model if profile and candidate else "",
        "route": decision.route if decision else "",
        "bypass": [reason.value for reason in decision.bypass] if decision else [],
        "pool": candidate.pool if candidate else "",
        "lane": candidate.lane if candidate else "",
        "worker": candidate.worker_id if candidate else "",
        "reason": candidate.reason if candidate else "",
        "prefix": served.prefix,
        "attempts": served.attempts,
        "seconds": round(served.seconds, 6),
        "added_s": _rounded(served.added_s),
        "waited_s": round(served.waited_s, 6),
        "first_token_s": _rounded(served.first_token_s),
        "token_s": _rounded(served.token_s),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "drafts": drafts.steps,
        "drafted_tokens": drafts.drafted,
        "accepted_tokens": drafts.accepted,
    }


def _rounded(seconds: float | None) -> float:
    """Write a duration; 0 where it was not measured."""
    return 0.0 if seconds is None else round(seconds, 6)
