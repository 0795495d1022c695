"""Bodies that would fill the disk of the nginx in front of the gateways, as it is shipped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

from bench.attack.attack import Attack
from bench.attack.http_client import Answer, Connection, chat_body, connection, encode
from tests.support.compose_file import SECRETS
from tests.support.front import PATH, PORT, NginxClient, running_front

_CONNECTIONS: Final = 48
_ADDRESSES: Final = 6
_MB: Final = 1 << 20
_LARGE_BYTES: Final = 32 * _MB
_NEIGHBOUR_BYTES: Final = 20_000
_NEIGHBOUR_S: Final = 2.0
_PROBE_S: Final = 0.02
_PAUSE_S: Final = 0.05
_DISK_BYTES: Final = 8 * _MB
"""Of the 64 MB that nginx has here; it needs none for a body."""
_KEY: Final = SECRETS["PACELINE_API_KEY"]


class _Kind(NamedTuple):
    """A kind of body. `length_bytes` 0 is an unknown length."""

    name: str
    path: str
    key: str
    length_bytes: int
    sent_bytes: int
    """The client sends no more, and keeps the connection."""

    def head(self) -> bytes:
        length = f"content-length: {self.length_bytes}"
        fields = (length if self.length_bytes else "transfer-encoding: chunked",)
        return encode(None, path=self.path, key=self.key, headers=fields)

    def pieces(self) -> Iterator[bytes]:
        for begin in range(0, self.sent_bytes, 1 << 16):
            piece = b"x" * min(1 << 16, self.sent_bytes - begin)
            yield piece if self.length_bytes else b"%x\r\n%b\r\n" % (len(piece), piece)


_KINDS: Final = (
    _Kind("large", PATH, "", _LARGE_BYTES, _LARGE_BYTES),
    _Kind("slow", PATH, "", _LARGE_BYTES, 1),
    _Kind("unknown length", PATH, "", 0, 30 * _MB),
    _Kind("another route", "/", "", _MB - 1, _MB - 1),
    _Kind("heartbeat", "/admin/v1/workers/x", "", _MB - 1, _MB - 1),
    _Kind("below the limit", PATH, "", 9_999, 9_998),
    _Kind("large, with a key", PATH, _KEY, _LARGE_BYTES, _LARGE_BYTES - 1),
    _Kind("slow, with a key", PATH, _KEY, _LARGE_BYTES, 1),
    _Kind("unknown length, with a key", PATH, _KEY, 0, 30 * _MB),
    _Kind("a megabyte, with a key", PATH, _KEY, 999_999, 999_998),
)


class Front(Attack):
    """Connections of several addresses, with a key and without, beside an honest neighbour."""

    name = "front"
    promise = "a neighbour with a key and 20 kB is answered, errors are JSON, the disk stays empty"
    share = 0.06

    async def run(self) -> None:
        if os.geteuid() or not shutil.which("unshare"):
            self.tally.notes.append("not played: it needs network namespaces")
            return
        async with _running(self.target.home / "front") as self._front:
            self._took_s: list[float] = []
            neighbour = asyncio.create_task(self._ask_for_ever())
            share_s = max(2.0, (self.deadline_s - time.monotonic()) / len(_KINDS))
            for kind in _KINDS:
                before = len(self._took_s)
                used_bytes = await self._flood(kind, share_s)
                if used_bytes > _DISK_BYTES:
                    self.tally.fail(f"{used_bytes >> 20} MB on the disk", kind.name)
                if len(self._took_s) == before:
                    self.tally.fail("the neighbour had no answer", kind.name)
            neighbour.cancel()
            await asyncio.wait((neighbour,))
        times_s = self._took_s
        p99_s = quantiles(times_s, n=100)[-1] if len(times_s) > 1 else float("inf")
        self.tally.notes.append(f"neighbour p99 {p99_s * 1000:,.0f} ms of {len(times_s):,} answers")
        if p99_s > _NEIGHBOUR_S:
            self.tally.fail(f"the neighbour waits {p99_s:.1f} s", "p99")

    async def _flood(self, kind: _Kind, share_s: float) -> int:
        """Send one kind of body for some time; return the most bytes on the disk."""
        machine = self._front.machine
        addresses = itertools.cycle(machine.addresses_here(_ADDRESSES))
        ends_s, used_bytes = time.monotonic() + share_s, 0
        async with asyncio.TaskGroup() as group:
            senders = [
                group.create_task(self._send_again(kind, address, ends_s))
                for address in itertools.islice(addresses, _CONNECTIONS)
            ]
            while time.monotonic() < ends_s:
                used_bytes = max(used_bytes, machine.used_bytes())
                await asyncio.sleep(_PROBE_S)
            for sender in senders:
                sender.cancel()
        return used_bytes

    def _connected(self, address: str) -> contextlib.AbstractAsyncContextManager[Connection]:
        return connection(PORT, host=self._front.machine.address, local=address)

    async def _send_again(self, kind: _Kind, address: str, ends_s: float) -> None:
        while time.monotonic() < ends_s:
            self.tally.begin(kind.name)
            try:
                async with self._connected(address) as opened:
                    if await opened.send(kind.head()):
                        sending = asyncio.create_task(_send(opened, kind))
                        try:
                            self.tally.answer(await opened.read_answer(), kind.name)
                        finally:
                            sending.cancel()
            except OSError:
                self.tally.answer(Answer(), kind.name)
            await asyncio.sleep(_PROBE_S)

    async def _ask_for_ever(self) -> None:
        """Send honest requests of an address of its own, one after another."""
        (*_, address) = self._front.machine.addresses_here(9)
        body = json.dumps(chat_body("demo", "x" * _NEIGHBOUR_BYTES)).encode()
        raw = encode(body, path=PATH, key=_KEY)
        while True:
            began_s, answer = time.monotonic(), Answer()
            with contextlib.suppress(OSError):
                async with self._connected(address) as opened:
                    await opened.send(raw)
                    answer = await opened.read_answer()
            if answer.status == 200:
                self._took_s.append(time.monotonic() - began_s)
            else:
                problem = f"{answer.status} {answer.code} for the neighbour"
                self.tally.fail(problem, answer.body[:100])
            await asyncio.sleep(_PROBE_S)


@contextlib.asynccontextmanager
async def _running(folder: Path) -> AsyncIterator[NginxClient]:
    """Run nginx, two gateways and a worker.

    Their network is that of this thread, from which the attack comes too; nothing else runs.
    """
    folder.mkdir()  # noqa: ASYNC240  # as all of the start it blocks a loop that runs nothing else
    with running_front(folder) as front, front.joined():
        yield front


async def _send(opened: Connection, kind: _Kind) -> None:
    for piece in kind.pieces():
        if not await opened.send(piece):
            return
        await asyncio.sleep(_PAUSE_S)  # the neighbour shares this event loop
