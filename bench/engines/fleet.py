"""Engines of several kinds under one model name, and two of which one fails."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from bench.engines.cases import WORD, chat, picture
from bench.engines.gateway import READY_S, Gateway, gateway_of, relayed
from bench.engines.recorder import FailingRelay
from bench.harness.contenders import PEERS
from bench.harness.parts import JOIN_TOKEN
from bench.harness.servers import Server, running_engine
from gateway.config.static_workers import StaticWorker
from tests.support.worker_process import running_worker

_FLEET: Final = ("mlx-lm", "mlx-vlm", "vllm-mlx")
"""Beside our own worker, all under the name of its model."""
_FAILING: Final = "vllm-mlx"
"""It takes each kind of request."""
_MODEL: Final = "demo"
_OURS: Final = "paceline"
_REQUESTS: Final = 500
_FAILING_REQUESTS: Final = 100

Bodies = Sequence[tuple[str, dict[str, Any]]]


def _mixed_bodies(count: int, seed: int) -> Bodies:
    """Return requests of several kinds, in a random order."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        text = f"{WORD} ({number})"
        kinds: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/v1/chat/completions", chat(text, temperature=0)),
            ("/v1/chat/completions", chat(text, temperature=0.7, stream=True)),
            ("/v1/chat/completions", chat(picture(), temperature=0)),
            ("/v1/completions", {"prompt": text, "max_tokens": 8}),
            ("/v1/messages", chat(text, stream=True)),
        )
        path, body = kinds[rng.randrange(len(kinds))]
        made.append((path, {"model": _MODEL, **body}))
    return made


def _running(name: str, folder: Path) -> contextlib.AbstractAsyncContextManager[Server]:
    engine = next(one for one in PEERS if one.name == name)
    return running_engine(engine, folder, log=f"{name}.fleet")


def _entry(name: str, server: Server, url: str = "") -> StaticWorker:
    return StaticWorker(id=name, url=url or server.url, models={_MODEL: server.model})


def _try_fleet(gateway: Gateway) -> tuple[str, bool]:
    token = {"PACELINE_JOIN_TOKEN": JOIN_TOKEN}
    with running_worker("--id", _OURS, "--join", gateway.url, environment=token):
        gateway.wait_until_ready(_OURS, *_FLEET)
        began_s = time.monotonic()
        results = _ask_at_once(gateway, _mixed_bodies(_REQUESTS, seed=26))
        took_s = time.monotonic() - began_s
        workers = gateway.workers()
    counts = {
        name: sum(lane["requests"] for lane in one["lanes"].values())
        for name, one in workers.items()
    }
    shares = ", ".join(f"{name} {count}" for name, count in counts.items())
    text = (
        f"{_REQUESTS} mixed requests at once to {len(workers)} engines under one name in "
        f"{took_s:.0f} s: {_describe(results)}; by engine: {shares}."
    )
    return text, not set(results) - {"ok"}


async def _try_failing(server: Server) -> tuple[str, bool]:
    """Ask two engines of which one answers nine of ten with 500; both are one real engine."""
    with relayed(FailingRelay(server.url)) as (relay, url):
        entries = _entry("steady", server), _entry("failing", server, url)
        bodies = _mixed_bodies(_FAILING_REQUESTS, seed=10)
        async with gateway_of(*entries) as gateway:
            await asyncio.to_thread(gateway.wait_until_ready, "steady", "failing")
            results = await asyncio.to_thread(_ask_at_once, gateway, bodies)
    text = (
        f"Two engines, one of which answered {relay.asked - relay.asked // 10} of "
        f"{relay.asked} with 500 at once: of {_FAILING_REQUESTS} requests {_describe(results)}."
    )
    return text, not set(results) - {"ok"}


def _describe(results: Counter[str]) -> str:
    failed = Counter({text: count for text, count in results.items() if text != "ok"})
    return f"{results['ok']} answered, {failed.total()} failed ({dict(failed) or 'none'})"


def _ask_at_once(gateway: Gateway, bodies: Bodies) -> Counter[str]:
    """Send all requests at once; count the answers as `ok`, `cut`, or by their errors."""
    barrier = threading.Barrier(len(bodies))

    def ask(one: tuple[str, dict[str, Any]]) -> str:
        path, body = one
        barrier.wait(timeout=READY_S)
        response = gateway.client.post(path, json=body)
        if response.status_code != 200:
            return f"{response.status_code} {response.text[:120]}"
        ends = any(end in response.text for end in ("[DONE]", "message_stop"))
        return "ok" if ends or not body.get("stream") else "cut"

    with ThreadPoolExecutor(len(bodies)) as executor:
        return Counter(executor.map(ask, bodies))


async def try_fleets(folder: Path) -> list[tuple[str, bool]]:
    """Run both fleets; return what was seen of each, and whether every request was answered."""
    async with contextlib.AsyncExitStack() as stack:
        entries = [
            _entry(name, await stack.enter_async_context(_running(name, folder))) for name in _FLEET
        ]
        gateway = await stack.enter_async_context(gateway_of(*entries))
        found = [await asyncio.to_thread(_try_fleet, gateway)]
    async with _running(_FAILING, folder) as server:
        found.append(await _try_failing(server))
    return found
