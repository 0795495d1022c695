"""Processes under test: a gateway, and real workers of the demo model that join it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from bench.failover.streams import body_of, has_text
from bench.harness.parts import (
    AS_ADMIN,
    JOIN_TOKEN,
    Part,
    fixed_port,
    gateway_part,
    wait_until_up,
    worker_part,
)
from paceline.protocol import PROGRESS_HEADER
from tests.support.failover_fleet import CHAT

_AS_WORKER: Final = {"authorization": f"Bearer {JOIN_TOKEN}"}
_AS_GATEWAY: Final = {**_AS_WORKER, "x-request-id": "r", PROGRESS_HEADER: "1"}
"""The headers of a request to a worker that is to tell its tokens."""
_READY_S: Final = 300.0
_API_KEY: Final = "api-key-of-the-bench"
_LOOPBACK: Final = "127.0.0.1"


@dataclass(slots=True)
class Fleet:
    """A gateway and workers as processes."""

    home: Path
    port: int
    host: str
    """At which workers reach the gateway."""
    client: httpx.AsyncClient
    """Of the gateway, and of a worker by its whole URL."""
    parts: dict[str, Part] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    """Of the boots that have joined and live."""

    async def start(self, name: str, *, host: str = "", within: tuple[str, ...] = ()) -> None:
        """Start a worker, and wait until this boot of it has joined.

        It listens at a `host` of its own, or at that of the gateway.
        """
        earlier = await self.joined_url(name)
        joins = ("--join", f"http://{self.host}:{self.port}", "--prefix-cache-gb", "0")
        flags = (*joins, "--host", host or self.host)
        self.parts[name] = worker_part(
            self.home, 0, *flags, worker_id=name, name=f"worker-{name}", within=within
        )
        await self.parts[name].start()
        async with asyncio.timeout(_READY_S):
            joined = await self.wait_for_url(name, after=earlier)
        # Kernels that no request has used yet are compiled for the first one.
        await self.first_token_s(joined, body_of("greedy", number=-1))
        self.urls[name] = joined

    async def wait_for_url(self, name: str, *, after: str = "") -> str:
        """Wait until a worker has joined with another address than this one; return it."""
        while True:
            if (joined := await self.joined_url(name)) not in ("", after):
                return joined
            await asyncio.sleep(0.2)

    async def joined_url(self, name: str) -> str:
        """Return the address of a worker; empty while it has not joined."""
        path = f"/admin/v1/workers/{name}/joined"
        response = await self.client.get(path, headers=_AS_WORKER)
        return str(response.json()["url"]) if response.status_code == httpx.codes.OK else ""

    async def kill(self, name: str) -> None:
        """Kill a worker as kill -9 does, and wait until the kernel has closed its connections."""
        address = urlsplit(self.urls.pop(name))
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        await self.parts[name].kill()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def cordon(self, name: str, *, on: bool) -> None:
        path = f"/admin/v1/workers/{name}/cordon"
        response = await self.client.request("PUT" if on else "DELETE", path, headers=AS_ADMIN)
        response.raise_for_status()

    async def whole(self, url: str, body: object) -> bytes:
        """Return the stream of a worker without a failure, with the lines that tell its tokens."""
        response = await self.client.post(url + CHAT, json=body, headers=_AS_GATEWAY)
        return response.raise_for_status().content

    async def first_token_s(self, url: str, body: object) -> float:
        """Return the seconds after which a worker sends the first text of a stream."""
        began_s = time.perf_counter()
        sending = self.client.stream("POST", url + CHAT, json=body, headers=_AS_GATEWAY)
        async with sending as response:
            received = b""
            async for piece in response.aiter_raw():
                received += piece
                if has_text(received):
                    break
        return time.perf_counter() - began_s


@asynccontextmanager
async def running_fleet(
    home: Path, names: Sequence[str], *, host: str = _LOOPBACK
) -> AsyncIterator[Fleet]:
    """Run a gateway and these workers; `host` is an address of this machine."""
    port = fixed_port()
    bound = _LOOPBACK if host == _LOOPBACK else "0.0.0.0"
    gateway = gateway_part(home, port, HOST=bound, API_KEY=_API_KEY)
    headers = {"authorization": f"Bearer {_API_KEY}"}
    url = f"http://{_LOOPBACK}:{port}"
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=180) as client:
        fleet = Fleet(home, port, host, client)
        try:
            await gateway.start()
            await wait_until_up(port)
            await asyncio.gather(*map(fleet.start, names))
            yield fleet
        finally:
            for part in (*fleet.parts.values(), gateway):
                await part.stop()
