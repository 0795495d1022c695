"""Our processes under test, which can be killed and started again: gateways, workers, a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import httpx

from bench.harness.blas import preload
from bench.harness.processes import end, inherited, kill_session, start
from bench.harness.servers import ROOT
from tests.support.redis_server import RedisServer
from workers.demo import CHECKPOINT

JOIN_TOKEN: Final = "join-token-of-the-bench"
ADMIN_KEY: Final = "admin-key-of-the-bench"
AS_ADMIN: Final = {"authorization": f"Bearer {ADMIN_KEY}"}
_READY_S: Final = 300.0


class Part:
    """A process that can be killed and started again."""

    def __init__(self, name: str, command: tuple[str, ...], home: Path, **given: str) -> None:
        self.name = name
        self.home = home
        self.log = home / f"{name}.log"
        self._command = command
        self._environment = {**inherited(), **preload(), "PYTHONPATH": str(ROOT), **given}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, before_exec: Callable[[], None] | None = None) -> None:
        with self.log.open("ab") as output:
            self._process = await start(
                *self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.home,
                env=self._environment,
                preexec_fn=before_exec,  # no thread of ours holds a lock then
            )

    async def kill(self) -> None:
        kill_session(self.pid)
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None:
            await end(self._process)

    def tracebacks(self) -> int:
        return self.log.read_bytes().count(b"Traceback (most recent call last)")


def gateway_part(
    home: Path, port: int, *, name: str = "gateway", module: str = "gateway", **settings: str
) -> Part:
    """Return a gateway; settings without their prefix. `module` takes the words of `paceline`."""
    values = {"JOIN_TOKEN": JOIN_TOKEN, "ADMIN_KEY": ADMIN_KEY, "STATE_DIR": str(home / "state")}
    environment = {f"PACELINE_{key}": value for key, value in {**values, **settings}.items()}
    command = (sys.executable, "-m", module, "gateway", "--port", str(port))
    return Part(name, command, home, **environment)


def worker_part(
    home: Path,
    port: int,
    *flags: str,
    worker_id: str = "demo",
    name: str = "worker",
    within: tuple[str, ...] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Part:
    """Return a worker of the demo model; `within` are the words of a command that runs it."""
    command = (
        *(*within, sys.executable, "-m", "workers", "--model", str(CHECKPOINT)),
        *("--port", str(port), "--id", worker_id, *flags),
    )
    given = {"PACELINE_JOIN_TOKEN": JOIN_TOKEN, "HOME": str(home), **environment}
    return Part(name, command, home, **given)


def fixed_port() -> int:
    """Return a free port below the ephemeral range, which stays free while its process is down."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def wait_until_up(port: int) -> None:
    await _wait_until(lambda client: client.get("/livez"), port)


async def wait_until_served(port: int, key: str, model: str = "demo") -> None:
    """Wait until the gateway has an answer from a worker of this model."""
    headers = {"authorization": f"Bearer {key}"}
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": model, "messages": messages, "max_tokens": 1}
    await _wait_until(
        lambda client: client.post("/v1/chat/completions", json=body, headers=headers), port
    )


async def _wait_until(send: Callable[[httpx.AsyncClient], object], port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    async with asyncio.timeout(_READY_S), httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                response = await send(client)  # type: ignore[misc]
                if response.is_success:
                    return
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def running_parts(*parts: Part) -> AsyncIterator[None]:
    """Run processes within the context; stop the last one first."""
    async with contextlib.AsyncExitStack() as stack:
        for part in parts:
            stack.push_async_callback(part.stop)
            await part.start()
        yield


@contextlib.asynccontextmanager
async def running_redis(home: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(home)
    await asyncio.to_thread(server.start)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.kill)
