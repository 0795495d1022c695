"""Text from elsewhere, for terminals and logs: no control character of it may reach them."""

from __future__ import annotations

import logging

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
