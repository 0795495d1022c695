"""What processes print: text without control characters, and how far the start of a worker is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from workers.protocol import StartProgress

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


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def configure_logging(level: int, line_format: str) -> None:
    """Log to standard error, without control characters."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(line_format))
    logging.basicConfig(level=level, handlers=[handler])


class StartDisplay:
    """Shows the start of a worker: a bar on a terminal, elsewhere a line now and then."""

    LINE_EVERY_S = 8.0

    def __init__(self, output: TextIO | Console) -> None:
        self._output = output
        self._bar: Progress | None = None
        self._stage = ""
        self._printed_s = 0.0

    def show(self, progress: StartProgress) -> None:
        """Show how far the start is."""
        console = self._console()
        if console.is_terminal and not console.is_dumb_terminal:
            self._show_bar(console, progress)
        elif (
            progress.stage != self._stage
            or progress.elapsed_s - self._printed_s >= self.LINE_EVERY_S
        ):
            self._stage, self._printed_s = progress.stage, progress.elapsed_s
            console.print(f"Starting: {progress.summary} ...", markup=False)

    def close(self) -> None:
        """Remove the bar; the next start begins a new one."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._stage = None, ""

    def _console(self) -> Console:
        # Imported late: a command that starts no worker needs neither.
        from rich.console import Console  # noqa: PLC0415

        if not isinstance(self._output, Console):
            self._output = Console(file=self._output, highlight=False, soft_wrap=True)
        return self._output

    def _show_bar(self, console: Console, progress: StartProgress) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn  # noqa: PLC0415

        if self._bar is None:
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(
                SpinnerColumn(), text, BarColumn(24), console=console, transient=True
            )
            self._bar.add_task("", total=None)
        self._bar.update(
            self._bar.task_ids[0],
            description=f"Starting: {progress.summary}",
            completed=progress.done,
            total=progress.total or None,
        )
        self._bar.start()
