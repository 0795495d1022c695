"""A listener that must receive no connection, and the fields of an error."""

import re
import socket

import httpx


class CanaryListener:
    """A listening socket to which no process may connect."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def has_no_connections(self) -> bool:
        try:
            self._listener.accept()
        except BlockingIOError:
            return True
        return False


def error_fields(response: httpx.Response) -> tuple[int, str, str | None]:
    """Return status, code and field of an error; check that its message shows no address."""
    error = response.json()["error"]
    assert not re.search(r"0x[0-9a-f]{4,}", error["message"]), (
        "CVE-2026-22778: no address of memory"
    )
    return response.status_code, error["code"], error["param"]
