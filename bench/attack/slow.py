"""Slow readers and slow writers."""

from __future__ import annotations

import asyncio
import json
import time
from random import Random
from typing import Final

from bench.attack.attack import Attack
from bench.attack.http_client import Connection, chat_body, connection, encode
from bench.attack.liar import ENDLESS, MODEL

_CONNECTIONS: Final = 100
_CUT_WITHIN_S: Final = 60.0
"""The limits of the attacked gateway are 3 s; a busy machine checks them late."""
_PAUSE_S: Final = 0.2
_UNREAD_S: Final = 15.0
"""A gateway sees that nobody reads once the buffers of both systems are full."""
_SYSTEM_BYTES: Final = 64 * 1024


class SlowClients(Attack):
    """Heads and bodies byte by byte, bodies without end, and streams that nobody reads."""

    name = "slow"
    promise = "each connection is cut in time; others are answered"
    share = 0.06

    concurrency = _CONNECTIONS

    async def one(self, chance: Random) -> None:
        kind = chance.choice((self._head, self._body, self._half_body, self._reader))
        await kind(chance)

    def _port(self, chance: Random) -> int:
        return chance.choice((self.target.gateway_port, self.target.worker_port))

    async def _head(self, chance: Random) -> None:
        raw = b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10_000
        await self._trickle(self._port(chance), b"", raw)

    async def _body(self, chance: Random) -> None:
        request_id = self.target.request_id(self.name)
        raw = encode(b"x" * 10_000, key=self.target.key, request_id=request_id)
        begin, end, rest = raw.partition(b"\r\n\r\n")
        await self._trickle(self.target.gateway_port, begin + end, rest)
        self.target.sent.add(request_id)

    async def _half_body(self, chance: Random) -> None:
        """Get the answer to a request whose body never ends."""
        raw = encode(b"x" * 100, path="/livez")[:-50]
        async with connection(self._port(chance)) as opened:
            await opened.send(raw.replace(b"connection: close\r\n", b""))
            await self._until_cut(opened, "a body without an end")

    async def _reader(self, chance: Random) -> None:
        text = f"{ENDLESS} {chance.getrandbits(48):x}"
        request_id = self.target.request_id(self.name)
        body = json.dumps(chat_body(MODEL, text, stream=True)).encode()
        async with connection(
            self.target.gateway_port, limit=1, system_bytes=_SYSTEM_BYTES
        ) as opened:
            await opened.send(encode(body, key=self.target.key, request_id=request_id))
            self.target.sent.add(request_id)
            await asyncio.sleep(_UNREAD_S)
            await self._until_cut(opened, "a stream that nobody reads")

    async def _trickle(self, port: int, before: bytes, raw: bytes) -> None:
        async with connection(port) as opened:
            await opened.send(before)
            until_s = time.monotonic() + _CUT_WITHIN_S
            reading = asyncio.create_task(opened.read_some())
            for at in range(len(raw)):
                if reading.done() or time.monotonic() > until_s:
                    break
                await opened.send(raw[at : at + 1])
                await asyncio.sleep(_PAUSE_S)
            reading.cancel()
            await self._until_cut(opened, "a slow request")

    async def _until_cut(self, opened: Connection, name: str) -> None:
        self.tally.begin(name)
        cut = await opened.is_closed(_CUT_WITHIN_S)
        self.tally.answers["cut" if cut else "open"] += 1
        if not cut:
            self.tally.fail("the connection is still open", name)
