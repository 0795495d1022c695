"""kill -9 of each part under load, and its restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from bench.attack.attack import WORKER_CODES, Attack, request
from bench.attack.http_client import CHAT, chat_body, encode, send
from bench.attack.stack import attacked_gateway, attacked_worker
from bench.harness.parts import (
    ADMIN_KEY,
    fixed_port,
    running_parts,
    running_redis,
    wait_until_served,
    wait_until_up,
)

_CLIENTS: Final = 6
_LOAD_S: Final = 2.0
_AFTER: Final = 10
# Longer than a restarted gateway takes to read the counts of earlier processes.
_EXCHANGE_S: Final = 1.5
_ALLOWED: Final = WORKER_CODES | {"shutting_down", "state_unavailable", "write_unconfirmed"}
_WORDS: Final = "Count from one to twenty."


class Kills(Attack):
    """A gateway, a worker and a Redis of its own; each is killed while clients ask."""

    name = "kill -9"
    promise = "an answer, an error or a broken connection; all serve and count again"
    share = 0.1

    async def run(self) -> None:
        self._port, worker_port = fixed_port(), fixed_port()
        with tempfile.TemporaryDirectory(dir=self.target.home) as folder:
            home = Path(folder)
            async with running_redis(home) as redis:
                gateway = attacked_gateway(home, self._port, REDIS_URL=redis.url)
                worker = attacked_worker(home, worker_port, self._port)

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
                    await wait_until_up(self._port)

                restarts = {
                    "worker": restart_worker,
                    "redis": restart_redis,
                    "gateway": restart_gateway,
                }
                async with running_parts(gateway, worker):
                    await wait_until_up(self._port)
                    await self._kill_each(restarts)
            for part in (gateway, worker):
                if part.tracebacks():
                    self.tally.fail("a traceback in a log", part.log.read_text()[-500:])

    async def _kill_each(self, restarts: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Kill one part after another, until the time is up and each has been killed."""
        created = [await self._admin("keys", {"name": name}) for name in ("client", "revoked")]
        self._key = created[0]["secret"]
        await self._admin(f"keys/{created[1]['id']}", method="DELETE")
        await wait_until_served(self._port, self._key)
        counts = dict.fromkeys(restarts, 0)
        while time.monotonic() < self.deadline_s or not all(counts.values()):
            name = [*restarts][sum(counts.values()) % len(restarts)]
            ended = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for _ in range(_CLIENTS):
                    group.create_task(self._load(ended))
                await asyncio.sleep(_LOAD_S * self.rng.uniform(0.2, 1.0))
                await restarts[name]()
                await wait_until_served(self._port, self._key)
                ended.set()
            counts[name] += 1
            await self._check(created[1]["secret"], name)
        killed = ", ".join(f"{name} {count}" for name, count in counts.items())
        self.tally.notes.append(f"killed: {killed} times")

    async def _admin(self, path: str, body: object = None, method: str = "") -> dict[str, str]:
        path = f"/admin/v1/{path}"
        answer = await request(self._port, path, body, method=method, key=ADMIN_KEY)
        return dict(answer.json() if answer.body else {})

    async def _load(self, ended: asyncio.Event) -> None:
        """Send requests until the part is back; a connection may break, but no stream may lie."""
        while not ended.is_set():
            stream, tokens = self.rng.random() < 0.5, self.rng.choice((1, 8, 32))
            body = chat_body("demo", _WORDS, max_tokens=tokens, stream=stream)
            self.tally.begin(body)
            answer = await send(self._port, encode(json.dumps(body).encode(), key=self._key))
            self.tally.answer(answer, body, allowed=_ALLOWED)
            if stream and answer.status == 200 and answer.done:
                if b'"finish_reason":"' not in answer.body.replace(b": ", b":"):
                    self.tally.fail("[DONE] without a finish", answer.body[-300:])
            elif stream and answer.status == 200 and answer.complete and not answer.stream_error:
                self.tally.fail("a stream without an end", answer.body[-300:])
            if not answer.status:
                await asyncio.sleep(0.05)  # a killed gateway refuses connections at once

    async def _check(self, revoked: str, part: str) -> None:
        """Require exact counts after a restart, and that a revoked key stays revoked."""
        refused = await request(self._port, "/v1/models", key=revoked)
        if refused.status != 401:
            self.tally.fail(f"{refused.status} for a revoked key after kill -9", part)
        before = await self._total()
        body = chat_body("demo", "Hi", max_tokens=1)
        for _ in range(_AFTER):
            self.tally.answer(await request(self._port, CHAT, body, key=self._key), part)
        self.tally.inputs += _AFTER
        counted = await self._total() - before
        if counted != _AFTER:
            self.tally.fail(f"{counted} of {_AFTER} requests counted after kill -9", part)

    async def _total(self) -> int:
        """Return the number of counted requests, once none runs and Redis has been read."""
        last = None
        while True:
            status = await request(self._port, "/v1/status", key=self._key)
            with contextlib.suppress(ValueError, KeyError):
                read = status.json()
                total = int(sum(read["outcomes"].values()))
                idle = not read["gateway"]["requests_in_flight"]
                if idle and read["store"]["gateways"] and total == last:
                    return total
                last = total
            await asyncio.sleep(_EXCHANGE_S)
