"""An address that must never be asked, and what those are told who name one."""

from __future__ import annotations

import re
import socket

import httpx


class CanaryListener:
    """A listening socket at which nobody must ever ask for anything."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def has_no_connections(self) -> bool:
        """Say whether nobody has connected to it."""
        try:
            self._listener.accept()
        except BlockingIOError:
            return True
        return False


def error_fields(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Read status, code and field of an error, whose words tell nothing of the process."""
    error = answer.json()["error"]
    assert not re.search(r"0x[0-9a-f]{4,}", error["message"]), (
        "CVE-2026-22778: no address of memory"
    )
    return answer.status_code, error["code"], error["param"]
