"""A client that disconnects cancels its generations, streamed or not."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker, worker_client
from workers.engine.types import Delta
from workers.server import response


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_disconnect_cancels_an_unstreamed_generation(choices: int) -> None:
    engine = ScriptedEngine([asyncio.Event()])
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "n": choices}
    async with worker_client(engine) as client:
        request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await engine.started.wait()
        request.cancel()
        await engine.all_closed.wait()
    assert len(engine.generations) == choices


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("started", [False, True])
async def test_a_disconnect_cancels_a_streamed_generation(started, choices, caplog) -> None:
    engine = ScriptedEngine([*[Delta(text="A")] * started, asyncio.Event()])
    body = {"model": "scripted", "prompt": "x", "stream": True, "n": choices}
    worker = make_worker(engine)
    async with serve_worker(worker) as url:
        reader, writer = await _send(url, "/v1/completions", body)
        await engine.started.wait()
        if started:
            await reader.readuntil(b"data: ")
        writer.close()
        await engine.all_closed.wait()
        await worker.traffic.idle.wait()
    assert [record.msg for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_client_that_stops_reading_loses_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "WRITE_STALL_S", 0.05)
    more_than_the_socket_buffers = [Delta(text="A" * 100_000)] * 200
    engine = ScriptedEngine([*more_than_the_socket_buffers, asyncio.Event()])
    worker = make_worker(engine)
    async with serve_worker(worker) as url:
        body = {"model": "scripted", "prompt": "x", "stream": True}
        reader, writer = await _send(url, "/v1/completions", body)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await engine.started.wait()
        await worker.traffic.idle.wait()
        writer.transport.abort()
    assert engine.all_closed.is_set()


async def _send(
    url: str, path: str, body: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer
