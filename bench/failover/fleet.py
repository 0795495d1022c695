"""Processes under test: a gateway, and real workers of the demo model that join it.

Workers fork from a server process that has imported their modules, since the imports are four
fifths of a start. From there on each is what `paceline worker` is.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from bench.attack.stack import ADMIN_KEY, JOIN_TOKEN, fixed_port, gateway_part, wait_until_up
from bench.failover.streams import body_of, has_text
from paceline.protocol import PROGRESS_HEADER
from tests.support.failover_fleet import CHAT
from workers.demo import CHECKPOINT

AS_GATEWAY: Final = {
    "authorization": f"Bearer {JOIN_TOKEN}",
    "x-request-id": "r",
    PROGRESS_HEADER: "1",
}
"""The headers of a request to a worker that is to tell its tokens."""
_PRELOADED: Final = (
    "workers.server.main",
    "workers.server.start",
    "workers.server.app",
    "workers.engine.engine",
    __name__,
)
_READY_S: Final = 300.0
_API_KEY: Final = "api-key-of-the-bench"
_LOOPBACK: Final = "127.0.0.1"
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(list(_PRELOADED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process listens."""

    host: str = _LOOPBACK
    namespace: Path | None = None
    """Of the network; None: that of this process."""


def _serve(name: str, gateway_url: str, log: Path, place: Place) -> None:
    """Run a worker in this process that joins a gateway and keeps nothing on disk."""
    from workers.server.main import main  # noqa: PLC0415 - this process runs no engine

    arguments = (
        *("--model", str(CHECKPOINT), "--host", place.host, "--port", "0", "--id", name),
        *("--prefix-cache-gb", "0", "--join", gateway_url),
    )
    os.environ["PACELINE_JOIN_TOKEN"] = JOIN_TOKEN
    if place.namespace and ctypes.CDLL(None).setns(os.open(place.namespace, os.O_RDONLY), 0):
        sys.exit(f"The network namespace {place.namespace} cannot be entered.")
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    sys.exit(main(arguments))


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker that can be killed and started again."""

    name: str
    url: str = ""
    """Of the boot that has joined; empty while none has."""
    process: BaseProcess | None = None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self.process is not None
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        """Kill the process."""
        assert self.process is not None
        self.process.kill()
        self.url = ""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A gateway and workers as processes."""

    home: Path
    port: int
    host: str
    """At which workers reach the gateway."""
    client: httpx.AsyncClient
    """Of the gateway, and of a worker by its whole URL."""
    workers: dict[str, WorkerProcess] = field(default_factory=dict)

    async def start(self, name: str, place: Place | None = None) -> None:
        """Start a worker, and wait until this boot of it has joined."""
        worker = self.workers.setdefault(name, WorkerProcess(name=name))
        earlier = await self.joined_url(name)
        url = f"http://{self.host}:{self.port}"
        worker.process = _processes.Process(
            target=_serve,
            args=(name, url, self.home / f"worker-{name}.log", place or Place(host=self.host)),
            daemon=True,
        )
        await asyncio.to_thread(worker.process.start)
        async with asyncio.timeout(_READY_S):
            joined = await self.wait_for_url(name, after=earlier)
        # Kernels that no request has used yet are compiled for the first one.
        await self.first_token_s(joined, body_of("greedy", number=-1))
        worker.url = joined

    async def wait_for_url(self, name: str, *, after: str = "") -> str:
        """Wait until a worker has joined with another address than this one; return it."""
        while True:
            if (joined := await self.joined_url(name)) not in ("", after):
                return joined
            await asyncio.sleep(0.2)

    async def joined_url(self, name: str) -> str:
        """Return the address of a worker; empty while it has not joined."""
        headers = {"authorization": f"Bearer {JOIN_TOKEN}"}
        response = await self.client.get(f"/admin/v1/workers/{name}/joined", headers=headers)
        return str(response.json()["url"]) if response.status_code == httpx.codes.OK else ""

    async def kill(self, name: str) -> None:
        """Kill a worker as kill -9 does, and wait until the kernel has closed its connections."""
        address = urlsplit(self.workers[name].url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        self.workers[name].kill()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    async def cordon(self, name: str, *, on: bool) -> None:
        """Let a worker get no new requests, or let it get them again."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        path = f"/admin/v1/workers/{name}/cordon"
        response = await self.client.request("PUT" if on else "DELETE", path, headers=headers)
        response.raise_for_status()

    async def whole(self, url: str, body: object) -> bytes:
        """Return the stream of a worker without a failure, with the lines that tell its tokens."""
        response = await self.client.post(url + CHAT, json=body, headers=AS_GATEWAY)
        return response.raise_for_status().content

    async def first_token_s(self, url: str, body: object) -> float:
        """Return the seconds after which a worker sends the first text of a stream."""
        began_s = time.perf_counter()
        sending = self.client.stream("POST", url + CHAT, json=body, headers=AS_GATEWAY)
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
    client = httpx.AsyncClient(
        base_url=f"http://{_LOOPBACK}:{port}",
        headers={"authorization": f"Bearer {_API_KEY}"},
        timeout=180,
    )
    fleet = Fleet(home=home, port=port, host=host, client=client)
    try:
        async with client:
            await gateway.start()
            await wait_until_up(port)
            await asyncio.gather(*map(fleet.start, names))
            yield fleet
    finally:
        for worker in fleet.workers.values():
            if worker.process is not None:
                worker.process.kill()
                await asyncio.to_thread(worker.process.join)
        await gateway.stop()
