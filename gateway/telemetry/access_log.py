"""The access log: one JSON line for each request, without any of its text.

A thread writes the lines a few times a second, from a bounded queue, so neither requests nor
shutdown wait for a slow disk or a blocked pipe.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import sys
import time
from collections import deque
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Self

from gateway.errors import StartupError
from gateway.strict_json import encode_json
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Drafts

log = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
_STANDARD_OUTPUT_PATH = "/dev/stdout"
_WRITE_INTERVAL_S = 0.25
_CLOSE_TIMEOUT_S = 2.0
# Some seconds of a busy gateway; a disk that is slower for longer must not fill the memory.
_QUEUE_LIMIT = 100_000
_LOSS_LOG_INTERVAL_S = 1.0
_NO_DRAFTS = Drafts(0, 0, 0, ())


class AccessLog:
    """An async context that opens the log at construction and writes queued lines on exit.

    `target` is a file to append to, or `-` for standard output. Raise `StartupError` if it cannot
    be opened. A file that was renamed is opened anew, so logs can be rotated.
    """

    def __init__(self, target: str) -> None:
        self._lines: deque[str] = deque()
        self._losses = _LossCounter()
        self._file = _LogFile(target, self._losses)
        self._stopping = Event()
        self._thread = Thread(target=self._write_lines, name="access log", daemon=True)

    def write(self, record: RequestRecord, unix_s: float) -> None:
        """Queue the line of one request, or drop it if the queue is full."""
        if len(self._lines) < _QUEUE_LIMIT:
            self._lines.append(encode_json(access_log_entry(record, unix_s)).decode())
        else:
            self._losses.add("queue full")

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, _CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("access_log.close_timeout")
            # At exit `logging` would wait for the lock of the handler whose write is blocked.
            atexit.unregister(logging.shutdown)
        self._losses.log()

    def _write_lines(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_WRITE_INTERVAL_S)
            while self._lines:
                self._file.handle(logging.makeLogRecord({"msg": self._lines.popleft()}))
        self._file.close()


class _LogFile(WatchedFileHandler):
    """A file or standard output; failed writes are counted as lost lines."""

    def __init__(self, target: str, losses: _LossCounter) -> None:
        self._losses = losses
        standard_output = target == STANDARD_OUTPUT
        path = _STANDARD_OUTPUT_PATH if standard_output else str(Path(target).expanduser())
        try:
            super().__init__(path, encoding="utf-8")
        except OSError as error:
            raise StartupError(
                f"The access log {path} cannot be opened for writing ({error.strerror}). Set "
                "PACELINE_ACCESS_LOG to another file, or to - for standard output."
            ) from None

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; reopen the file first if it was moved away."""
        try:
            super().emit(record)
        except OSError:  # from reopening the file
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802
        """Count the line as lost; the base class would print a stack trace."""
        error = sys.exc_info()[1]
        self._losses.add((isinstance(error, OSError) and error.strerror) or type(error).__name__)

    def _open(self) -> TextIOWrapper:
        if self.baseFilename == _STANDARD_OUTPUT_PATH:
            return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
        return super()._open()


class _LossCounter:
    """Counts lost lines, and logs the count at most once a second."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines = 0
        self._reason = ""
        self._logged_s = -_LOSS_LOG_INTERVAL_S

    def add(self, reason: str) -> None:
        """Count one lost line."""
        with self._lock:
            self._lines += 1
            self._reason = reason
        if time.monotonic() - self._logged_s >= _LOSS_LOG_INTERVAL_S:
            self.log()

    def log(self) -> None:
        """Log the lines lost since the last call, if any."""
        with self._lock:
            lines, self._lines = self._lines, 0
            self._logged_s = time.monotonic()
        if lines:
            log.warning("access_log.lines_lost lines=%d reason=%s", lines, self._reason)


def access_log_entry(record: RequestRecord, unix_s: float) -> dict[str, Any]:
    """Return the fields of one line: our own names and numbers, no text that a client sent."""
    candidate, decision, usage = record.candidate, record.decision, record.usage
    drafts = record.drafts or _NO_DRAFTS
    profile = record.profile
    return {
        "event": "request.done",
        "time": datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds"),
        "request": record.request_id,
        "key": record.caller.key,
        "endpoint": profile.endpoint.value if profile else "",
        "stream": profile.stream if profile else False,
        "outcome": record.outcome.value,
        "status": record.status,
        "code": record.code,
        # Without a worker, the name of the model is still text from the client.
        "model": profile.model if profile and candidate else "",
        "route": decision.route if decision else "",
        "bypass": [reason.value for reason in decision.bypass] if decision else [],
        "pool": candidate.pool if candidate else "",
        "lane": candidate.lane if candidate else "",
        "worker": candidate.worker_id if candidate else "",
        "reason": candidate.reason if candidate else "",
        "prefix": record.prefix,
        "not_reused": record.missed_reuse,
        "attempts": record.attempts,
        "failovers": record.failovers,
        "duration_s": round(record.seconds, 6),
        "added_latency_s": _rounded(record.added_s),
        "wait_s": round(record.waited_s, 6),
        "first_token_s": _rounded(record.first_token_s),
        "token_s": _rounded(record.token_s),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "drafts": drafts.steps,
        "drafted_tokens": drafts.drafted,
        "accepted_tokens": drafts.accepted,
    }


def _rounded(seconds: float | None) -> float:
    """Return a duration in seconds, or 0 if it was not measured."""
    return 0.0 if seconds is None else round(seconds, 6)
