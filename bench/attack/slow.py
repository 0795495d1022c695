"""Slow readers and slow writers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from random import Random
from typing import Final

from bench.attack.attack import Tally, Target
from bench.attack.http_client import Connection, chat_body, connection, encode
from bench.attack.liar import ENDLESS, MODEL

_CONNECTIONS: Final = 100
_CUT_WITHIN_S: Final = 60.0
"""The limits of the attacked gateway are 3 s; a busy machine checks them late."""
_PAUSE_S: Final = 0.2
_UNREAD_S: Final = 15.0


class SlowClients:
    """Heads and bodies byte by byte, bodies without end, and streams that nobody reads."""

    name = "slow"
    promise = "each connection is cut in time; others are answered"
    share = 0.06

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        while time.monotonic() < deadline_s:
            async with asyncio.TaskGroup() as group:
                for _ in range(_CONNECTIONS):
                    one = rng.choice((self._head, self._body, self._half_body, self._reader))
                    group.create_task(one(target, Random(rng.getrandbits(64)), tally))

    async def _head(self, target: Target, chance: Random, tally: Tally) -> None:
        port = chance.choice((target.gateway_port, target.worker_port))
        await self._trickle(port, b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10_000, tally)

    async def _body(self, target: Target, chance: Random, tally: Tally) -> None:
        request_id = target.request_id("slow")
        raw = encode(b"x" * 10_000, key=target.key, request_id=request_id)
        begin, _, rest = raw.partition(b"\r\n\r\n")
        await self._trickle(target.gateway_port, rest, tally, before=begin + b"\r\n\r\n")
        target.sent.add(request_id)

    async def _half_body(self, target: Target, chance: Random, tally: Tally) -> None:
        """Get the answer to a request whose body never ends."""
        port = chance.choice((target.gateway_port, target.worker_port))
        raw = encode(b"x" * 100, path="/livez")[:-50]
        async with connection(port) as opened:
            await opened.send(raw.replace(b"connection: close\r\n", b""))
            await self._until_cut(opened, "a body without an end", tally)

    async def _reader(self, target: Target, chance: Random, tally: Tally) -> None:
        """Read nothing of a stream that never ends."""
        text = f"{ENDLESS} {chance.getrandbits(48):x}"
        request_id = target.request_id("slow")
        body = json.dumps(chat_body(MODEL, text, stream=True)).encode()
        async with connection(target.gateway_port, limit=1) as opened:
            await opened.send(encode(body, key=target.key, request_id=request_id))
            target.sent.add(request_id)
            await asyncio.sleep(_UNREAD_S)
            await self._until_cut(opened, "a stream that nobody reads", tally)

    async def _trickle(self, port: int, raw: bytes, tally: Tally, *, before: bytes = b"") -> None:
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
            await self._until_cut(opened, "a slow request", tally)

    async def _until_cut(self, opened: Connection, name: str, tally: Tally) -> None:
        """Read to the end of the connection."""
        tally.inputs += 1
        try:
            async with asyncio.timeout(_CUT_WITHIN_S):
                with contextlib.suppress(ConnectionError):
                    while await opened.reader.read(1 << 20):
                        pass
            tally.answers["cut"] += 1
        except TimeoutError:
            tally.answers["open"] += 1
            tally.fail("the connection is still open", name)
