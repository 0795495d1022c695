"""A DNS server for tests: one name, whose addresses change at run time."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Self

_HEADER = struct.Struct("!6H")
_RESPONSE = 0x8180  # no error; recursion was desired and is available
_TYPE_A = 1
_POINTER_TO_QUESTION = 0xC000 + _HEADER.size
_TTL_S = 60


class DnsServer:
    """Answers each question for A records with `addresses`, and all others with no record."""

    def __init__(self, bound: socket.socket) -> None:
        self.addresses: list[str] = []
        self._socket = bound

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._socket.sendto(b"", self._socket.getsockname())
            thread.join()
            self._socket.close()

    def _serve(self) -> None:
        while True:
            query, client = self._socket.recvfrom(4096)
            if not query:
                return
            self._socket.sendto(self._answer(query), client)

    def _answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", _HEADER.size) + 5  # the name, its type and its class
        question = query[_HEADER.size : end]
        (kind,) = struct.unpack("!H", question[-4:-2])
        addresses = self.addresses if kind == _TYPE_A else []
        records = b"".join(
            struct.pack("!HHHIH", _POINTER_TO_QUESTION, _TYPE_A, 1, _TTL_S, 4)
            + socket.inet_aton(address)
            for address in addresses
        )
        number = int.from_bytes(query[:2], "big")
        return _HEADER.pack(number, _RESPONSE, 1, len(addresses), 0, 0) + question + records
