"""kill -9 of each part under load, and its restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Final

from bench.attack.attack import WORKER_CODES, Answer, Tally, Target
from bench.attack.http_client import CHAT, chat_body, encode, request, send
from bench.attack.stack import (
    ADMIN_KEY,
    fixed_port,
    gateway_part,
    running_parts,
    running_redis,
    wait_until_served,
    wait_until_up,
    worker_part,
)

_CLIENTS: Final = 6
_LOAD_S: Final = 2.0
_AFTER: Final = 10
# Longer than a restarted gateway takes to read the counts of earlier processes.
_EXCHANGE_S: Final = 1.5
_ALLOWED: Final = WORKER_CODES | {"shutting_down", "state_unavailable", "write_unconfirmed"}
_WORDS: Final = "Count from one to twenty."


class Kills:
    """A gateway, a worker and a Redis of its own; each is killed while clients ask."""

    name = "kill -9"
    promise = "an answer, an error or a broken connection; all serve and count again"
    share = 0.1

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        gateway_port, worker_port = fixed_port(), fixed_port()
        with tempfile.TemporaryDirectory(dir=target.home) as folder:
            home = Path(folder)
            async with running_redis(home) as redis:
                gateway = gateway_part(home, gateway_port, REDIS_URL=redis.url)
                worker = worker_part(home, worker_port, gateway_port)
                async with running_parts(gateway, worker):
                    await wait_until_up(gateway_port)
                    key = await _create_key(gateway_port, "client")
                    revoked = await _create_key(gateway_port, "revoked")
                    path = f"/admin/v1/keys/{revoked['id']}"
                    await request(gateway_port, path, method="DELETE", key=ADMIN_KEY)
                    await wait_until_served(gateway_port, key["secret"], "demo")

                    async def restart_redis() -> None:
                        await asyncio.to_thread(redis.kill)
                        await asyncio.sleep(_LOAD_S)
                        await asyncio.to_thread(redis.start)

                    async def restart_worker() -> None:
                        await worker.kill()
                        await worker.start()

                    async def restart_gateway() -> None:
                        await gateway.kill()
                        await gateway.start()
                        await wait_until_up(gateway_port)

                    restarts = [
                        ("worker", restart_worker),
                        ("redis", restart_redis),
                        ("gateway", restart_gateway),
                    ]
                    counts = dict.fromkeys((name for name, _ in restarts), 0)
                    while time.monotonic() < deadline_s or not all(counts.values()):
                        name, restart = restarts[sum(counts.values()) % len(restarts)]
                        ended = asyncio.Event()
                        async with asyncio.TaskGroup() as group:
                            for _ in range(_CLIENTS):
                                one = self._load(gateway_port, key["secret"], ended, rng, tally)
                                group.create_task(one)
                            await asyncio.sleep(_LOAD_S * rng.uniform(0.2, 1.0))
                            await restart()
                            await wait_until_served(gateway_port, key["secret"], "demo")
                            ended.set()
                        counts[name] += 1
                        await self._check(
                            gateway_port, key["secret"], revoked["secret"], name, tally
                        )
                    killed = ", ".join(f"{name} {count}" for name, count in counts.items())
                    tally.notes.append(f"killed: {killed} times")
                    for part in (gateway, worker):
                        if part.tracebacks():
                            tally.fail("a traceback in a log", part.log.read_text()[-500:])

    async def _load(
        self, port: int, key: str, ended: asyncio.Event, rng: Random, tally: Tally
    ) -> None:
        """Send requests until the part is back; a connection may break, but no stream may lie."""
        while not ended.is_set():
            stream = rng.random() < 0.5
            body = chat_body("demo", _WORDS, max_tokens=rng.choice((1, 8, 32)), stream=stream)
            answer = await send(port, encode(json.dumps(body).encode(), path=CHAT, key=key))
            tally.inputs += 1
            tally.answer(answer, body, allowed=_ALLOWED)
            if stream and answer.status == 200 and answer.done:
                if b'"finish_reason":"' not in answer.body.replace(b": ", b":"):
                    tally.fail("[DONE] without a finish", answer.body[-300:])
            elif stream and answer.status == 200 and answer.complete and not answer.stream_error:
                tally.fail("a stream without an end", answer.body[-300:])
            if not answer.status:
                await asyncio.sleep(0.05)  # a killed gateway refuses connections at once

    async def _check(self, port: int, key: str, revoked: str, part: str, tally: Tally) -> None:
        """Require exact counts after a restart, and that a revoked key stays revoked."""
        refused = await request(port, "/v1/models", key=revoked)
        if refused.status != 401:
            tally.fail(f"{refused.status} for a revoked key after kill -9", part)
        before = await _total(port, key)
        body = chat_body("demo", "Hi", max_tokens=1)
        for _ in range(_AFTER):
            tally.answer(await request(port, CHAT, body, key=key), part)
        tally.inputs += _AFTER
        counted = await _total(port, key) - before
        if counted != _AFTER:
            tally.fail(f"{counted} of {_AFTER} requests counted after kill -9", part)


async def _create_key(port: int, name: str) -> dict[str, str]:
    answer = await request(port, "/admin/v1/keys", {"name": name}, key=ADMIN_KEY)
    created: dict[str, str] = answer.json()
    return created


async def _total(port: int, key: str) -> int:
    """Return the number of counted requests, once none is running and Redis has been read."""
    last = None
    while True:
        status: Answer = await request(port, "/v1/status", key=key)
        with contextlib.suppress(ValueError, KeyError):
            read = status.json()
            total = int(sum(read["outcomes"].values()))
            idle = not read["gateway"]["requests_in_flight"]
            if idle and read["store"]["gateways"] and total == last:
                return total
            last = total
        await asyncio.sleep(_EXCHANGE_S)
