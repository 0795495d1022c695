"""Engines of several kinds under one model name, and two of which one fails."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import yaml

from bench.attack.stack import ADMIN_KEY, JOIN_TOKEN, fixed_port, gateway_part, wait_until_up
from bench.engines.cases import WORD, chat, picture
from bench.engines.recorder import FailingRelay
from bench.engines.serving import READY_S, patient_policy, relayed
from bench.harness.contenders import PEERS
from bench.harness.servers import Server, running
from bench.harness.venvs import python_of
from gateway.config.static_workers import StaticWorker
from tests.support.running_gateway import wait_until
from tests.support.worker_process import running_worker
from workers.demo import CHECKPOINT

_FLEET: Final = ("mlx-lm", "mlx-vlm", "vllm-mlx")
"""Beside our own worker, all under the name of its model."""
_FAILING: Final = "vllm-mlx"
"""It takes each kind of request."""
_MODEL: Final = "demo"
_OURS: Final = "paceline"
_REQUESTS: Final = 500
_FAILING_REQUESTS: Final = 100


def _mixed_bodies(model: str, count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
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
        made.append((path, {"model": model, **body}))
    return made


def _running(name: str, venvs: Path) -> contextlib.AbstractAsyncContextManager[Server]:
    """Start an engine."""
    engine = next(one for one in PEERS if one.name == name)
    assert engine.venv is not None
    python = python_of(engine.venv, venvs)
    return running(engine, python=python, model=CHECKPOINT, log=venvs / f"{name}.fleet.log")


@contextlib.asynccontextmanager
async def _engines(venvs: Path) -> AsyncIterator[list[StaticWorker]]:
    """Start several engines at a time; all serve one model name."""
    async with contextlib.AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(_running(name, venvs)) for name in _FLEET}
        yield [
            StaticWorker(id=name, url=server.url, models={_MODEL: server.model})
            for name, server in servers.items()
        ]


def _settings(folder: Path, entries: Sequence[StaticWorker]) -> dict[str, str]:
    """Write the files of a gateway of these engines; return the settings that name them."""
    config, policy = folder / "paceline.yaml", folder / "policy.yaml"
    workers = [{"id": one.id, "url": one.url, "models": dict(one.names)} for one in entries]
    config.write_text(yaml.safe_dump({"workers": workers}))
    policy.write_text(patient_policy())
    return {"CONFIG": str(config), "POLICY": str(policy)}


@contextlib.asynccontextmanager
async def _gateway(entries: Sequence[StaticWorker]) -> AsyncIterator[httpx.Client]:
    """Run a gateway of these engines in a process of its own, once all of them are ready."""
    port = fixed_port()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        gateway = gateway_part(Path(folder), port, **_settings(Path(folder), entries))
        try:
            await gateway.start()
            await wait_until_up(port)
            client = httpx.Client(
                base_url=f"http://127.0.0.1:{port}",
                timeout=1800,
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            )
            with client:
                await asyncio.to_thread(_wait_until_ready, client, [one.id for one in entries])
                yield client
        finally:
            await gateway.stop()


def _workers(client: httpx.Client) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    return dict(client.get("/v1/status", headers=headers).json()["workers"])


def _wait_until_ready(client: httpx.Client, names: Sequence[str]) -> None:
    def ready() -> bool:
        workers = _workers(client)
        return all(workers.get(name, {}).get("state") == "ready" for name in names)

    wait_until(ready, within_s=READY_S)


def _try_fleet(client: httpx.Client) -> tuple[str, Counter[str]]:
    token = {"PACELINE_JOIN_TOKEN": JOIN_TOKEN}
    with running_worker("--id", _OURS, "--join", str(client.base_url), environment=token):
        _wait_until_ready(client, [_OURS])
        began_s = time.monotonic()
        results = _ask_at_once(client, _mixed_bodies(_MODEL, _REQUESTS, seed=26))
        took_s = time.monotonic() - began_s
        workers = _workers(client)
    counts = {
        name: sum(lane["requests"] for lane in one["lanes"].values())
        for name, one in workers.items()
    }
    shares = ", ".join(f"{name} {count}" for name, count in counts.items())
    text = (
        f"{_REQUESTS} mixed requests at once to {len(workers)} engines under one name in "
        f"{took_s:.0f} s: {_describe(results)}; by engine: {shares}."
    )
    return text, results


async def _try_failing(server: Server) -> tuple[str, Counter[str]]:
    """Ask two engines of which one answers nine of ten with 500; both are one real engine."""
    with relayed(FailingRelay(server.url)) as (relay, url):
        entries = [
            StaticWorker(id=name, url=one, models={_MODEL: server.model})
            for name, one in (("steady", server.url), ("failing", url))
        ]
        bodies = _mixed_bodies(_MODEL, _FAILING_REQUESTS, seed=10)
        async with _gateway(entries) as client:
            results = await asyncio.to_thread(_ask_at_once, client, bodies)
    text = (
        f"Two engines, one of which answered {relay.asked - relay.asked // 10} of "
        f"{relay.asked} with 500 at once: of {_FAILING_REQUESTS} requests {_describe(results)}."
    )
    return text, results


def _describe(results: Counter[str]) -> str:
    failed = Counter({text: count for text, count in results.items() if text != "ok"})
    return f"{results['ok']} answered, {failed.total()} failed ({dict(failed) or 'none'})"


def _ask_at_once(
    client: httpx.Client, bodies: Sequence[tuple[str, dict[str, Any]]]
) -> Counter[str]:
    """Send all requests at once; count the answers as `ok`, `cut`, or by their errors."""
    barrier = threading.Barrier(len(bodies))

    def ask(one: tuple[str, dict[str, Any]]) -> str:
        path, body = one
        barrier.wait(timeout=READY_S)
        response = client.post(path, json=body)
        if response.status_code != 200:
            return f"{response.status_code} {response.text[:120]}"
        ended = not body.get("stream") or any(
            end in response.text for end in ("[DONE]", "message_stop")
        )
        return "ok" if ended else "cut"

    with ThreadPoolExecutor(len(bodies)) as executor:
        return Counter(executor.map(ask, bodies))


async def try_fleets(venvs: Path) -> list[tuple[str, bool]]:
    """Run both fleets; return what was seen of each, and whether every request was answered."""
    async with _engines(venvs) as entries, _gateway(entries) as client:
        found = [await asyncio.to_thread(_try_fleet, client)]
    async with _running(_FAILING, venvs) as server:
        found.append(await _try_failing(server))
    return [(text, not set(results) - {"ok"}) for text, results in found]
