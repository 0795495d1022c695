"""Raw HTTP: requests whose framing is ambiguous or invalid, and mutations of them."""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Final

from bench.attack.attack import Attack
from bench.attack.http_client import connection
from bench.harness.parts import JOIN_TOKEN

_QUIET_S: Final = 0.25
_HIDDEN: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
"""A request inside the body of another one; its answer would show a second reading."""
_HIDDEN_ANSWER: Final = b"alive"
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
_PIECES: Final = (
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\0", b" ", b"\t", b":", b",", b";", b"0\r\n\r\n"),
    *(b"chunked", b"identity", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n"),
    *(b"Content-Length: 18446744073709551617\r\n", b"ffffffffffffffff\r\n", b"-1", b"+5", b"0x5"),
    *(b"\xff\xfe", b"\xe2\x80\xa8", b"HTTP/0.9", b"HTTP/2.0", b"Expect: 100-continue\r\n"),
    *(b"Connection: close, upgrade\r\nUpgrade: h2c\r\n", b"X: " + b"a" * 40_000 + b"\r\n"),
    b"".join(b"H%d: v\r\n" % number for number in range(120)),
)


def _post(*headers: bytes, body: bytes = b"", host: bytes = b"Host: localhost") -> bytes:
    return b"\r\n".join((b"POST /v1/models HTTP/1.1", host, *headers, b"", body))


_LENGTH: Final = b"Content-Length: %d" % len(_HIDDEN)
_UPGRADE: Final = (b"Connection: upgrade", b"Upgrade: h2c")
_CHUNKED: Final = b"Transfer-Encoding: chunked"
_CHUNK: Final = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_HIDDEN), _HIDDEN)
_CHUNK_OF: Final = b"\r\n" + _HIDDEN + b"\r\n0\r\n\r\n"
_SIZE: Final = b"%x" % len(_HIDDEN)
_GET: Final = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"

FRAMINGS: Final = {
    "length": _post(_LENGTH, body=_HIDDEN),
    "chunked": _post(_CHUNKED, body=_CHUNK),
    "length, then chunked": _post(b"Content-Length: 4", _CHUNKED, body=_CHUNK),
    "chunked, then length": _post(_CHUNKED, b"Content-Length: 4", body=_CHUNK),
    "two lengths": _post(_LENGTH, b"Content-Length: 0", body=_HIDDEN),
    "two lengths, reversed": _post(b"Content-Length: 0", _LENGTH, body=_HIDDEN),
    "comma in a length": _post(_LENGTH + b", 0", body=_HIDDEN),
    "equal lengths in one header": _post(_LENGTH + b", 42", body=_HIDDEN),
    "signed length": _post(b"Content-Length: +%d" % len(_HIDDEN), body=_HIDDEN),
    "negative length": _post(b"Content-Length: -1", body=_HIDDEN),
    "hexadecimal length": _post(b"Content-Length: 0x%x" % len(_HIDDEN), body=_HIDDEN),
    "length with leading zeros": _post(b"Content-Length: 00%d" % len(_HIDDEN), body=_HIDDEN),
    "overflowing length": _post(b"Content-Length: %d" % (2**64 + 4), body=_HIDDEN),
    "space before a colon": _post(b"Content-Length : %d" % len(_HIDDEN), body=_HIDDEN),
    "list of codings": _post(b"Transfer-Encoding: gzip, chunked", body=_CHUNK),
    "chunked not last": _post(b"Transfer-Encoding: chunked, identity", body=_CHUNK),
    "chunked twice": _post(_CHUNKED, _CHUNKED, body=_CHUNK),
    "identity": _post(b"Transfer-Encoding: identity", _LENGTH, body=_HIDDEN),
    "unknown coding": _post(b"Transfer-Encoding: xchunked", body=_CHUNK),
    "quoted coding": _post(b'Transfer-Encoding: "chunked"', body=_CHUNK),
    "folded coding": _post(b"Transfer-Encoding:\r\n chunked", body=_CHUNK),
    "coding behind a tab": _post(b"Transfer-Encoding:\tchunked", body=_CHUNK),
    "vertical tab in a coding": _post(b"Transfer-Encoding: \x0bchunked", body=_CHUNK),
    "coding behind a bare CR": _post(b"X: a\rTransfer-Encoding: chunked", body=_CHUNK),
    "coding behind a bare LF": _post(b"X: a\nTransfer-Encoding: chunked", body=_CHUNK),
    "NUL in a value": _post(b"X: a\0b", _LENGTH, body=_HIDDEN),
    "extension of a chunk": _post(_CHUNKED, body=_SIZE + b";a=b" + _CHUNK_OF),
    "LF in an extension": _post(_CHUNKED, body=_SIZE + b";a\n" + _CHUNK_OF),
    "signed size": _post(_CHUNKED, body=b"+" + _SIZE + _CHUNK_OF),
    "size with 0x": _post(_CHUNKED, body=b"0x" + _SIZE + _CHUNK_OF),
    "padded size": _post(_CHUNKED, body=b"0" * 30 + _SIZE + _CHUNK_OF),
    "overflowing size": _post(_CHUNKED, body=b"1" + b"0" * 16 + _CHUNK_OF),
    "size behind a space": _post(_CHUNKED, body=b" " + _SIZE + _CHUNK_OF),
    "trailers": _post(_CHUNKED, body=b"0\r\nContent-Length: 40\r\nHost: evil\r\n\r\n"),
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/1.0 and chunked": _post(_CHUNKED, body=_CHUNK).replace(b"/1.1", b"/1.0", 1),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0",
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + _HIDDEN,
    "absolute form": b"GET http://evil/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": _post(_LENGTH, body=_HIDDEN, host=b"X: y"),
    "two hosts": _post(b"Host: evil", _LENGTH, body=_HIDDEN),
    "foreign host": _post(_LENGTH, body=_HIDDEN, host=b"Host: evil.example"),
    "user in a host": _post(_LENGTH, body=_HIDDEN, host=b"Host: localhost@evil"),
    "upgrade with a body": _post(*_UPGRADE, _LENGTH, body=_HIDDEN),
    "upgrade and chunked": _post(*_UPGRADE, _CHUNKED, body=_CHUNK),
    "expectation": _post(b"Expect: 100-continue", _LENGTH, body=_HIDDEN),
    "encoded slash": _GET.replace(b"/v1/models", b"/v1%2fmodels/..%2f") + b"\r\n",
    "dots in a path": _GET.replace(b"/v1", b"/admin/v1/../../v1") + b"\r\n",
    "NUL in a path": _GET.replace(b"/v1", b"/\0v1") + b"\r\n",
}  # fmt: skip
"""Raw requests, each with a hidden one where a wrong reading would find it."""


class RawHttp(Attack):
    """Framings and mutations of them, at the port of the gateway and at that of the worker."""

    name = "raw-http"
    promise = "one reading of each request, no hidden one answered"
    share = 0.22
    concurrency = 64

    async def prepare(self) -> None:
        self._ports = (self.target.gateway_port, self.target.worker_port)
        if not self.tally.inputs:  # once, in the first turn
            every = (self._send(port, raw) for raw in FRAMINGS.values() for port in self._ports)
            await asyncio.gather(*every)

    async def one(self, chance: Random) -> None:
        side = chance.random() < 0.35
        raw = mutate(chance.choice([*FRAMINGS.values()]), chance)
        if chance.random() < 0.5:
            raw = raw.replace(b"POST /v1/models", b"POST " + chance.choice(_PATHS), 1)
        if chance.random() < 0.5:
            secret = JOIN_TOKEN if side else self.target.key
            header = b"HTTP/1.1\r\nAuthorization: Bearer " + secret.encode()
            raw = raw.replace(b"HTTP/1.1", header, 1)
        await self._send(self._ports[side], raw, hidden=False)

    async def _send(self, port: int, raw: bytes, *, hidden: bool = True) -> None:
        self.tally.begin(raw)
        try:
            async with connection(port) as opened:
                await opened.send(raw)
                received = await opened.read_all(_QUIET_S)
        except OSError as error:
            self.tally.fail(f"no connection: {error}", raw)
            return
        statuses = list(_STATUS.finditer(received))
        if not statuses:
            self.tally.answers["no HTTP" if received else "none"] += 1
        ends = [*(found.start() for found in statuses[1:]), len(received)]
        for found, end in zip(statuses, ends, strict=False):
            _, _, body = received[found.start() : end].partition(b"\r\n\r\n")
            self.count(int(found[1]), body, raw)
        if hidden and _HIDDEN_ANSWER in received:
            self.tally.fail("the hidden request was answered", raw)


_PATHS: Final = (
    *(b"/v1/chat/completions", b"/v1/completions", b"/v1/route/explain", b"/admin/v1/keys"),
    *(b"/admin/v1/workers/x", b"/v1/status", b"/metrics", b"/livez", b"//v1/models", b"*", b"/"),
)


def mutate(raw: bytes, chance: Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 3))):
        at = chance.randrange(len(raw) + 1)
        end = min(len(raw), at + chance.randint(1, 16))
        match chance.randrange(7):
            case 0:
                raw = raw[:at] + chance.choice(_PIECES) + raw[at:]
            case 1:
                raw = raw[:at] + chance.randbytes(end - at) + raw[end:]
            case 2:
                raw = raw[:at] + raw[end:]
            case 3:
                raw = raw[:end] + raw[at:]
            case 4:
                lines = raw.split(b"\r\n")
                chance.shuffle(lines)
                raw = b"\r\n".join(lines)
            case 5:
                other = chance.choice([*FRAMINGS.values()])
                raw = raw[:at] + other[chance.randrange(len(other)) :]
            case _:
                raw = raw[:at]
    return raw or b"\r\n"
