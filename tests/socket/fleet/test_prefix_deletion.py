"""What workers have cached of an isolation scope is deleted with its last key."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from gateway.cli import main
from tests.support.gateway_fixtures import MakeGateway
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    status_and_code,
    wait_until,
)
from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker, text_events
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker


async def deleted(engine: ScriptedEngine, scope: str) -> None:
    """Wait until a worker has deleted what it has cached of a scope."""
    await asyncio.to_thread(wait_until, lambda: scope in engine.dropped)


@asynccontextmanager
async def joined_worker(gateway: RunningGateway, boot_id: str) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(text_events("Hi"))
    worker = make_worker(engine)
    object.__setattr__(worker, "boot_id", boot_id)
    token = {"authorization": f"Bearer {JOIN_TOKEN}"}
    async with serve_worker(worker, JOIN_TOKEN) as url, httpx.AsyncClient(timeout=60) as client:
        report = worker.report().model_copy(update={"url": url}).model_dump(mode="json")
        path = f"{gateway.url}/admin/v1/workers/{worker.worker_id}"
        (await client.put(path, headers=token, json=report)).raise_for_status()
        yield engine
        (await client.delete(path, headers=token)).raise_for_status()


async def scope_of(gateway: RunningGateway, key: dict[str, str], engine: ScriptedEngine) -> str:
    """Send a request with a key; return the scope that the worker got."""
    body = {"model": engine.card.model, "messages": [{"role": "user", "content": "Hello"}]}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        headers = bearer_headers(key)
        response = await client.post("/v1/chat/completions", headers=headers, json=body)
        response.raise_for_status()
    scope = engine.generations[-1].prompt.scope
    assert scope
    return scope


async def test_workers_delete_what_the_last_key_of_a_scope_has_left(
    monkeypatch: pytest.MonkeyPatch, make_gateway: MakeGateway
) -> None:
    monkeypatch.setattr("gateway.assembly._DELETION_S", 0.05)
    gateway = make_gateway()
    alone, red, red_too = [
        await asyncio.to_thread(gateway.create_key, team=team) for team in ("", "red", "red")
    ]
    async with joined_worker(gateway, "one") as engine:
        scopes = [await scope_of(gateway, key, engine) for key in (alone, red, red_too)]
        assert scopes[0] != scopes[1] == scopes[2]
        for key in (red, alone):
            await asyncio.to_thread(gateway.revoke_key, key)
        await deleted(engine, scopes[0])
        assert scopes[1] not in engine.dropped, "another key of the team is valid"
        await asyncio.to_thread(gateway.revoke_key, red_too)
        await deleted(engine, scopes[1])
        assert len(engine.dropped) == len(set(engine.dropped)), "each is deleted once"
    async with joined_worker(gateway, "two") as engine:  # it was away
        for scope in scopes:
            await deleted(engine, scope)


async def test_an_admin_empties_the_cache_of_a_worker(gateway: RunningGateway) -> None:
    async with joined_worker(gateway, "one") as engine:
        path = "/admin/v1/workers/scripted-1/prefix-cache"
        response = await asyncio.to_thread(gateway.admin.delete, path)
        assert response.status_code == 204
        assert engine.dropped == [None]
        unknown = await asyncio.to_thread(gateway.admin.delete, path.replace("-1", "-2"))
        assert status_and_code(unknown) == (404, "worker_not_found")


async def test_the_command_empties_all_caches_beside_a_worker_that_starts(
    gateway: RunningGateway, worker: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.join(worker, ready=False, lanes=[])
    clear = ["prefix-cache", "clear", "--url", gateway.url]
    async with joined_worker(gateway, "one") as engine:
        assert await asyncio.to_thread(main, clear) == 1
        assert engine.dropped == [None]
        assert await asyncio.to_thread(main, [*clear, "scripted-1"]) == 0
    printed = capsys.readouterr()
    assert printed.out == 2 * "Emptied the prefix cache of scripted-1.\n"
    assert re.fullmatch("fake-a: .* try again once it is ready.\n", printed.err)
