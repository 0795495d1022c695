"""The processes under attack: a gateway with Redis, a worker with the demo model, and a liar.

The gateway has a core of its own, as it would on a machine without the attackers and the workers,
so a neighbour of the attacks waits for what the gateway does. Prepared answers to the neighbour
come from another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Final

from bench.attack.attack import Target
from bench.attack.gateway import LIMIT_S
from bench.attack.liar import LyingServer
from bench.attack.origins import ALLOWED
from bench.gateway.contenders import running_backend, send_heartbeats
from bench.harness.blas import preload
from bench.harness.parts import (
    Part,
    fixed_port,
    gateway_part,
    running_parts,
    running_redis,
    wait_until_served,
    wait_until_up,
    worker_part,
)
from bench.harness.processes import CORES, keep_to
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S

ACCESS_LOG: Final = "access.jsonl"
JEMALLOC: Final = find_library("jemalloc") if sys.platform == "linux" else None
"""Its library, if it is installed."""
_CACHE_BYTES: Final = str(4 << 20)
_CONTEXT_TOKENS: Final = "2048"
_REPORTING: Final = 4


def attacked_gateway(home: Path, port: int, **settings: str) -> Part:
    """Return a gateway with short limits for stalled clients and silent streams."""
    own = {"ACCESS_LOG": str(home / ACCESS_LOG), "ALLOWED_ORIGINS": ",".join(ALLOWED)}
    own["BODY_TIMEOUT_S"] = str(LIMIT_S)
    return gateway_part(home, port, module="bench.attack.gateway", **own, **settings)


def attacked_worker(home: Path, port: int, gateway_port: int | None = None) -> Part:
    """Return a worker whose memory is even: a small prefix cache, and no long answers.

    On Linux it has jemalloc if that is installed: glibc's allocator keeps free memory between the
    blocks that many threads took in turn, and so hides whether the worker keeps any.
    """
    joins = ("--join", f"http://127.0.0.1:{gateway_port}") if gateway_port else ()
    environment = {}
    if JEMALLOC is not None:
        preloaded = (JEMALLOC, preload().get("LD_PRELOAD"))
        environment["LD_PRELOAD"] = ":".join(filter(None, preloaded))
        environment["MALLOC_CONF"] = "background_thread:true"  # else idle threads keep free pages
    flags = ("--prefix-cache-gb", "0", "--prefix-cache-bytes", _CACHE_BYTES, *joins)
    return worker_part(home, port, "--context", _CONTEXT_TOKENS, *flags, environment=environment)


@contextlib.asynccontextmanager
async def running_target(home: Path) -> AsyncIterator[tuple[Target, Mapping[str, Part]]]:
    gateway_port, worker_port = fixed_port(), fixed_port()
    liar = LyingServer()
    keep_to(CORES[1:])
    async with (
        running_backend() as prepared_port,
        running_redis(home) as redis,
        liar.listening(_REPORTING),
    ):
        gateway = attacked_gateway(home, gateway_port, REDIS_URL=redis.url)
        worker = attacked_worker(home, worker_port, gateway_port)
        async with running_parts(gateway, worker):
            await wait_until_up(gateway_port)
            keep_to(CORES[:1], gateway.pid)
            target = Target(
                gateway_port=gateway_port, worker_port=worker_port, liar=liar, key="", home=home
            )
            target.key = (await target.create_key("honest"))["secret"]
            heartbeats = (
                asyncio.create_task(_send_heartbeats(target)),
                asyncio.create_task(
                    send_heartbeats(gateway_port, f"http://127.0.0.1:{prepared_port}")
                ),
            )
            try:
                await wait_until_served(gateway_port, target.key)
                yield target, {"gateway": gateway, "worker": worker}
            finally:
                for one in heartbeats:
                    one.cancel()
                await asyncio.wait(heartbeats)


async def _send_heartbeats(target: Target) -> None:
    """Send honest heartbeats of the worker that lies in its answers."""
    while True:
        await target.liar.join(target.gateway_port)
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
