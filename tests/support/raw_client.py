"""Clients of the gateway on raw sockets, and checks of its state after them."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.fault_proxy import RESET_AT_ONCE
from tests.support.running_gateway import RunningGateway, chat_body, wait_until
from tests.support.scripted_worker import DONE


class RawClient:
    """A client that sends any bytes at any time and may disconnect at any time."""

    def __init__(self, gateway: RunningGateway) -> None:
        port = int(gateway.url.rpartition(":")[2])
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def send_chat(self, **fields: Any) -> None:
        self.send(request_bytes(json.dumps(chat_body(**fields)).encode()))

    def read_until(self, mark: bytes) -> bytes:
        """Return received bytes up to a mark, or up to the end of the connection."""
        received = b""
        while mark not in received and (piece := self._socket.recv(65536)):
            received += piece
        return received

    def read_to_end(self) -> bytes:
        """Return all bytes until the gateway closes the connection."""
        received = b""
        while piece := self._socket.recv(65536):
            received += piece
        return received

    def half_close(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
        self._socket.close()


@contextmanager
def raw_client(gateway: RunningGateway) -> Iterator[RawClient]:
    client = RawClient(gateway)
    try:
        yield client
    finally:
        client.close()


def request_bytes(
    body: bytes, *, path: str = "/v1/chat/completions", close: bool = False, secret: str = ""
) -> bytes:
    """Return a complete request; `close` requests the end of the connection after its answer."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    head += "connection: close\r\n" * close
    head += f"authorization: Bearer {secret}\r\n" * bool(secret)
    return f"{head}\r\n".encode() + body


def leave_once(
    gateway: RunningGateway, condition: Callable[[], bool], secret: str, **fields: Any
) -> None:
    """Request a chat answer with a key, and disconnect once the condition is true."""
    with raw_client(gateway) as client:
        client.send(request_bytes(json.dumps(chat_body(**fields)).encode(), secret=secret))
        wait_until(condition)


def stream_error_code(received: bytes) -> str:
    """Return the code of the error event that ends a stream; fail if it ends otherwise."""
    assert DONE not in received
    *_, last, rest = received.split(b"\n\n")
    assert rest == b"", "the last event is complete"
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["code"])


def in_flight(gateway: RunningGateway) -> int:
    """Return the number of requests at the gateway plus that of used slots of all workers."""
    status = gateway.status()
    count: int = status["gateway"]["requests_in_flight"]
    for worker in status["workers"].values():
        count += sum(lane["in_flight"] for lane in worker["lanes"].values())
    return count


def wait_for_outcomes(gateway: RunningGateway, **outcomes: int) -> None:
    """Wait until no request is in flight; then compare the counted outcomes."""
    wait_until(lambda: in_flight(gateway) == 0)
    assert gateway.status()["outcomes"] == outcomes


PATH = b"/v1/chat/completions"


@contextlib.contextmanager
def open_socket(gateway: RunningGateway) -> Iterator[socket.socket]:
    port = int(gateway.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        yield raw


def chat_request(**fields: Any) -> bytes:
    body = json.dumps(chat_body(**fields)).encode()
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    return head % (PATH, len(body)) + body


def read_stream(raw: socket.socket) -> bytes:
    """Return all bytes up to the end of a stream or of the connection."""
    received = b""
    while not received.endswith(b"0\r\n\r\n") and (piece := raw.recv(1_000_000)):
        received += piece
    return received


def read_error(raw: socket.socket) -> tuple[int, str, bool]:
    """Return status and code of an error, and whether the connection ends after it."""
    received = b""
    while piece := raw.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"], b"connection: close" in head
