"""A client of the gateway that writes and reads plain bytes."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.support.running_gateway import Gateway, chat_body

PATH = b"/v1/chat/completions"


@contextlib.contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    port = int(gateway.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        yield raw


def request(**fields: Any) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    return head % (PATH, len(body)) + body


def streamed(raw: socket.socket) -> bytes:
    """All that comes, to the end of a stream or of the connection."""
    received = b""
    while not received.endswith(b"0\r\n\r\n") and (piece := raw.recv(1_000_000)):
        received += piece
    return received


def told(raw: socket.socket) -> tuple[int, str, bool]:
    """Status and error code of the answer, and whether the connection ends after it."""
    received = b""
    while piece := raw.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"], b"connection: close" in head
