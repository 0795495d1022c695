"""All text of log records."""

import contextlib
import logging
import threading
from collections.abc import Iterator

from paceline.terminal import LogFormatter


class LogCapture(logging.Handler):
    """A handler that stores every text that our formatter, or one of fields, writes of a record."""

    def __init__(self) -> None:
        super().__init__(level=logging.NOTSET)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in vars(record).items() if name != "exc_info"}
        self.texts += [LogFormatter().format(record), repr(fields | {"exc_text": ""})]


@contextlib.contextmanager
def capture_logs() -> Iterator[LogCapture]:
    """Capture the log of all threads but the current one, which has HTTP clients of its own."""
    handler, root = LogCapture(), logging.getLogger()
    thread_id = threading.get_ident()
    handler.addFilter(lambda record: record.thread != thread_id)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.NOTSET)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
