"""All that is logged, in whatever words."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Iterator


class LogCapture(logging.Handler):
    """Every record, in every word that any formatter could write of it."""

    def __init__(self) -> None:
        super().__init__(level=logging.NOTSET)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        told = [record.getMessage(), repr(record.__dict__)]
        if record.exc_info:
            told += traceback.format_exception(*record.exc_info)
        self.texts += told


@contextlib.contextmanager
def capture_logs() -> Iterator[LogCapture]:
    """Hear all that is logged meanwhile, but by the thread of a test: it has its own clients."""
    handler, root = LogCapture(), logging.getLogger()
    own = threading.get_ident()
    handler.addFilter(lambda record: record.thread != own)
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.NOTSET)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
