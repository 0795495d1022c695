"""The processes under attack: a gateway with Redis, a worker with the demo model, and a liar."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Final

from bench.attack.attack import Target
from bench.attack.http_client import chat_body, request
from bench.attack.liar import MODEL, LyingServer
from bench.attack.lying_workers import join
from bench.attack.origins import ALLOWED
from bench.harness.blas import preload
from bench.harness.processes import end, inherited, kill_session, start
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S
from tests.support.redis_server import RedisServer
from workers.demo import CHECKPOINT

ACCESS_LOG: Final = "access.jsonl"
JOIN_TOKEN: Final = "join-token-of-the-attack"
ADMIN_KEY: Final = "admin-key-of-the-attack"
JEMALLOC: Final = find_library("jemalloc") if sys.platform == "linux" else None
"""Its library, if it is installed."""
_ROOT: Final = Path(__file__).parents[2]
_READY_S: Final = 300.0
_LIMIT_S: Final = "3"
_KEEPALIVE_S: Final = "0.5"
_CACHE_BYTES: Final = str(4 << 20)
_CONTEXT_TOKENS: Final = "2048"
_REPORTING: Final = 4


class Part:
    """A process that can be killed and started again."""

    def __init__(self, name: str, arguments: tuple[str, ...], home: Path, **given: str) -> None:
        self.name = name
        self.log = home / f"{name}.log"
        self._arguments = arguments
        self.home = home
        self._environment = {**inherited(), **preload(), "PYTHONPATH": str(_ROOT), **given}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def start(self, before_exec: Callable[[], None] | None = None) -> None:
        """Start the process."""
        with self.log.open("ab") as output:
            self._process = await start(
                sys.executable,
                *self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.home,
                env=self._environment,
                preexec_fn=before_exec,  # no thread of ours holds a lock then
            )

    async def kill(self) -> None:
        """Kill the process as kill -9 does."""
        assert self._process is not None
        kill_session(self._process.pid)
        await self._process.wait()

    async def stop(self) -> None:
        """Stop the process as a service manager does."""
        if self._process is not None:
            await end(self._process)

    def tracebacks(self) -> int:
        """Return the number of tracebacks in its log."""
        return self.log.read_bytes().count(b"Traceback (most recent call last)")


def gateway_part(home: Path, port: int, **settings: str) -> Part:
    """Return a gateway with short limits for stalled clients and silent streams."""
    values = {
        "JOIN_TOKEN": JOIN_TOKEN,
        "ADMIN_KEY": ADMIN_KEY,
        "STATE_DIR": str(home / "state"),
        "ACCESS_LOG": str(home / ACCESS_LOG),
        "HEAD_TIMEOUT_S": _LIMIT_S,
        "BODY_TIMEOUT_S": _LIMIT_S,
        "WRITE_TIMEOUT_S": _LIMIT_S,
        "KEEPALIVE_S": _KEEPALIVE_S,
        "ALLOWED_ORIGINS": ",".join(ALLOWED),
        **settings,
    }
    environment = {f"PACELINE_{name}": value for name, value in values.items()}
    arguments = ("-m", "gateway", "gateway", "--port", str(port))
    return Part("gateway", arguments, home, **environment)


def worker_part(home: Path, port: int, gateway_port: int | None = None) -> Part:
    """Return a worker whose memory is even: a small prefix cache, and no long answers.

    On Linux it has jemalloc if that is installed: glibc's allocator keeps free memory between the
    blocks that many threads took in turn, and so hides whether the worker keeps any.
    """
    joins = ("--join", f"http://127.0.0.1:{gateway_port}") if gateway_port else ()
    arguments = (
        *("-m", "workers", "--model", str(CHECKPOINT), "--port", str(port), "--id", "demo"),
        *("--prefix-cache-gb", "0", "--context", _CONTEXT_TOKENS),
        *(*joins, "--prefix-cache-bytes", _CACHE_BYTES),
    )
    environment = {}
    if JEMALLOC is not None:
        preloaded = (JEMALLOC, preload().get("LD_PRELOAD"))
        environment["LD_PRELOAD"] = ":".join(filter(None, preloaded))
    return Part("worker", arguments, home, PACELINE_JOIN_TOKEN=JOIN_TOKEN, **environment)


def fixed_port() -> int:
    """Return a free port below the ephemeral range, which stays free while its process is down."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


async def wait_until_served(port: int, key: str, *models: str) -> None:
    """Wait until the gateway has an answer from a worker of each model."""
    async with asyncio.timeout(_READY_S):
        for model in models:
            body = chat_body(model, "Hi", max_tokens=1)
            while True:
                if (await request(port, "/v1/chat/completions", body, key=key)).status == 200:
                    break
                await asyncio.sleep(0.2)


async def wait_until_up(port: int) -> None:
    """Wait until a gateway or a worker accepts requests."""
    async with asyncio.timeout(_READY_S):
        while True:
            if (await request(port, "/livez")).status == 200:
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
    """Run a Redis within the context."""
    server = RedisServer(home)
    await asyncio.to_thread(server.start)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.kill)


@contextlib.asynccontextmanager
async def running_target(home: Path) -> AsyncIterator[tuple[Target, Mapping[str, Part]]]:
    """Run everything, with a key for the honest client."""
    gateway_port, worker_port = fixed_port(), fixed_port()
    liar = LyingServer()
    async with running_redis(home) as redis, liar.listening(_REPORTING):
        gateway = gateway_part(home, gateway_port, REDIS_URL=redis.url)
        worker = worker_part(home, worker_port, gateway_port)
        async with running_parts(gateway, worker):
            await wait_until_up(gateway_port)
            body = {"name": "honest"}
            created = await request(gateway_port, "/admin/v1/keys", body, key=ADMIN_KEY)
            target = Target(
                gateway_port=gateway_port,
                worker_port=worker_port,
                liar=liar,
                gateway_pid=gateway.pid,
                worker_pid=worker.pid,
                join_token=JOIN_TOKEN,
                admin_key=ADMIN_KEY,
                key=created.json()["secret"],
                key_id=created.json()["id"],
                home=home,
            )
            heartbeats = asyncio.create_task(_send_heartbeats(target))
            try:
                await wait_until_served(gateway_port, target.key, "demo")
                yield target, {"gateway": gateway, "worker": worker}
            finally:
                heartbeats.cancel()
                await asyncio.wait((heartbeats,))


async def _send_heartbeats(target: Target) -> None:
    """Send honest heartbeats of the worker that lies in its answers."""
    while True:
        await join(target, target.liar.report(), MODEL)
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
