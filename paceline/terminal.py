"""What processes print: text without control characters, logs, and how far a worker's start is.

A log has a line for machines, `redis.degraded part=keys problem=...`. A terminal shows a person the
same event as a sentence.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from paceline.protocol import StartProgress

_MARK = "\N{REPLACEMENT CHARACTER}"
# C0 but for tab and line feed, DEL and C1, and the marks that change the direction of text.
_CONTROLS = dict.fromkeys(
    {*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
    - {ord("\t"), ord("\n")},
    _MARK,
)


def printable(text: str) -> str:
    """Return the text with a mark in place of each control character but tabs and line feeds."""
    return text.translate(_CONTROLS)


TERMINAL_VARIABLE = "PACELINE_TERMINAL"
"""Set by a parent process that shows the log of its child on a terminal."""
_SENTENCES = {
    "access_log.lines_lost": "{lines} lines of the access log are lost: {reason}.",
    "answer.broken": "A worker sent a broken answer to request {request}.",
    "attempt.failed": "Request {request} failed on {worker} ({code}).",
    "attempt.lost": "The worker at {url} closed the connection of a request.",
    "attempt.unreachable": "No connection to the worker at {address}.",
    "engine.died": "The engine died, and the worker ends with it.",
    "fleet.id_taken": "Another worker, at {url}, asks for the id {worker} and does not get it.",
    "fleet.joined": "{worker} has joined and serves {model}.",
    "fleet.lost": "{worker} is gone: {text}.",
    "fleet.returned": "{worker} is back after {away_s:.0f} s.",
    "fleet.full": "{workers} workers have joined, and there is no room for {rejected}.",
    "key.ended_in_use": "The key {key} has ended, and {address} still uses it.",
    "heartbeat.failed": "The gateway does not hear this worker, which tries again: {text}",
    "heartbeat.recovered": "The gateway hears this worker again: {gateway}.",
    "gateway.unreachable": "The worker waits for its gateway. {text}",
    "mtp_head.tested": "{text}",
    "key.changed": "The key {key} has been changed.",
    "key.created": "The key {key} has been created.",
    "key.rotated": "The key {key} has a new secret.",
    "key.revoked": "The key {key} has been revoked.",
    "policy.changed": "Version {version} of the policy is active, by {author}: {note}",
    "policy.warning": "Version {version} of the policy: {message}",
    "policy_file.rejected": "The policy file {file} is not applied: {problems}",
    "queue.flooded": "{client} has {waiting} requests in the queue of {pool}.",
    "record.skipped": "A stored record is not in force: {kind} {name}: {why}",
    "records.unwritable": "{problem} Edits are refused until that ends.",
    "records.writable": "{path} can be written again.",
    "redis.degraded": "{problem} This gateway goes on alone until that ends.",
    "redis.recovered": "Redis works again.",
    "report.failed": "{worker} does not report its state: {error}",
    "request.broken": "Request {request} failed by a fault of the gateway.",
    "request.failed": "Request {request_id} failed by a fault of the worker.",
    "stream.broken": "The stream of request {request} broke: {why}.",
    "stream.cut": "The stream of request {request} broke off.",
    "worker.busy": "{worker} is busy and gets no requests for {pause_s:.1f} s.",
    "worker.cordoned": "{author} has cordoned {worker}, which gets no new requests.",
    "worker.draining": "Ending: running answers finish first. Ctrl-C again ends at once.",
    "worker.ejected": "{worker} gets no requests for a while: {reason}.",
    "worker.healthy": "{worker} works again.",
    "worker.joined": "Joined {gateway}.",
    "worker.leave_failed": "The gateway does not answer: {text}",
    "worker.left": "Signed off from {gateway}.",
    "worker.reached": "This gateway can connect to {worker} again.",
    "worker.uncordoned": "{author} has uncordoned {worker}.",
    "worker.unhealthy": "{worker} does not work: {reason}.",
    "worker.unreachable": "This gateway cannot connect to {worker}. {text}",
}
"""Events as sentences; `text` is what follows the fields of a log line."""
_SPEED_WINDOW_S = 6.0
_EVENT = re.compile(r"([a-z_]+\.[a-z_]+)\b(?:, [a-z]+)?(.*)", re.DOTALL)
_FIELD = re.compile(r"(\w+)=%")


class LogFormatter(logging.Formatter):
    """Formats a fault as its type and place: its words may be those of a client."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        if record.name == "asyncio":  # repeats the fault in the lines below
            record = logging.makeLogRecord(record.__dict__)
            record.msg, record.args = record.getMessage().partition("\n")[0], ()
        record.exc_text = None  # as another formatter wrote it
        return printable(super().format(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - of `logging`
        """Return types and places of a fault, of its causes and of its parts."""
        return "".join(_faults(traceback.TracebackException(*ei)))


def _faults(fault: traceback.TracebackException) -> Iterator[str]:
    before = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)
    if before is not None:
        yield from _faults(before)
        yield "\n\nThe next fault comes of it:\n"
    yield from ("Traceback (most recent call last):\n", *fault.stack.format())
    yield getattr(fault.exc_type, "__name__", "")
    for part in fault.exceptions or ():
        yield "\n\nA part of it:\n"
        yield from _faults(part)


class _TerminalFormatter(LogFormatter):
    """Formats an event as a sentence, an unknown one in the words of its log line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s  %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of `logging`
        """Return the line of a record, which `format` has filled in."""
        if found := _EVENT.fullmatch(record.message):
            event, rest = found.groups()
            fields: dict[str, object] = {}
            if isinstance(record.args, tuple):
                fields = dict(zip(_FIELD.findall(str(record.msg)), record.args, strict=False))
            text = re.sub(r"^(\s*\w+=\S+?(?=[:\s]|$))*[:\s]*", "", rest)
            try:
                record.message = _SENTENCES[event].format(**fields, text=text)
            except LookupError:
                words = event.replace(".", " ").replace("_", " ").capitalize()
                record.message = f"{words}:{rest}" if rest else f"{words}."
        return super().formatMessage(record)


class _ForPeople(logging.Filter):
    """Passes warnings, and of the notes those that have a sentence; tracebacks of faults alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        event = _EVENT.match(record.getMessage())
        if record.levelno < logging.ERROR:
            record.exc_info = None
        return record.levelno >= logging.WARNING or (event is not None and event[1] in _SENTENCES)


def configure_logging(level: int, line_format: str) -> None:
    """Log to standard error, without control characters; sentences if that is a terminal.

    No fault has its words in the log, that of a thread neither.
    """
    handler = logging.StreamHandler()
    if sys.stderr.isatty() or os.environ.get(TERMINAL_VARIABLE):
        handler.setFormatter(_TerminalFormatter())
        handler.addFilter(_ForPeople())
    else:
        handler.setFormatter(LogFormatter(line_format))
    logging.basicConfig(level=level, handlers=[handler])
    threading.excepthook = lambda fault: logging.getLogger(__name__).error(
        "thread.died",
        exc_info=(fault.exc_type, fault.exc_value or fault.exc_type(), fault.exc_traceback),
    )


class StartDisplay:
    """Shows a start or a measurement: a bar on a terminal, elsewhere a line now and then."""

    LINE_EVERY_S = 8.0

    def __init__(self, output: TextIO | Console, title: str = "Starting") -> None:
        self._output = output
        self._title = title
        self._bar: Progress | None = None
        self._stage = ""
        self._printed_s = 0.0
        self._downloads: deque[tuple[float, int]] = deque(maxlen=32)
        """Times and bytes of a download, for its speed."""

    def show(self, progress: StartProgress) -> None:
        """Show how far the start is."""
        # Imported late: a command that starts no worker needs neither.
        from rich.console import Console  # noqa: PLC0415

        if not isinstance(self._output, Console):
            self._output = Console(file=self._output, highlight=False, soft_wrap=True)
        console = self._output
        summary = f"{self._title}: {progress.summary}{self._speed(progress)}"
        if console.is_terminal and not console.is_dumb_terminal:
            self._show_bar(console, progress, summary)
        elif (
            progress.stage != self._stage
            or progress.elapsed_s - self._printed_s >= self.LINE_EVERY_S
        ):
            self._stage, self._printed_s = progress.stage, progress.elapsed_s
            console.print(f"{summary} ...", markup=False)

    def close(self) -> None:
        """Remove the bar; the next start begins a new one."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._stage = None, ""

    def _speed(self, progress: StartProgress) -> str:
        """Return the recent speed of a download, with a comma before it; empty while unknown."""
        if progress.stage != "download":
            self._downloads.clear()
            return ""
        seen = self._downloads
        seen.append((progress.elapsed_s, progress.done))
        while len(seen) > 2 and progress.elapsed_s - seen[0][0] > _SPEED_WINDOW_S:
            seen.popleft()
        begun_s, begun_bytes = seen[0]
        seconds, received_bytes = progress.elapsed_s - begun_s, progress.done - begun_bytes
        if seconds <= 0 or received_bytes <= 0:
            return ""
        return f", {received_bytes / seconds / 1e6:.1f} MB/s"

    def _show_bar(self, console: Console, progress: StartProgress, summary: str) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn  # noqa: PLC0415

        if self._bar is None:
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(
                *(SpinnerColumn(), text, BarColumn(24)),
                console=console,
                transient=True,
                refresh_per_second=4,  # drawing competes with the start
            )
            self._bar.add_task("", total=None)
        self._bar.update(
            self._bar.task_ids[0],
            description=summary,
            completed=progress.done,
            total=progress.total or None,
        )
        self._bar.start()
