"""Streams of a worker that are silent for long: their head, and comments in place of events."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.drain_rate import QueuePlace
from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_worker, text_events
from workers.engine.types import Delta, GenerationFailed, PrefillProgress
from workers.server.response import EventStream

BODY = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "stream": True}
LONG_S = 600.0


@asynccontextmanager
async def open_stream(
    script: list[Any] | ScriptedEngine, *, keepalive_s: float
) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[str]]]:
    """Yield a response whose head has come, and the lines of its body."""
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(script)
    worker = replace(make_worker(engine), keepalive_s=keepalive_s)
    async with (
        serve_worker(worker) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
        client.stream("POST", "/v1/chat/completions", json=BODY) as response,
    ):
        yield response, response.aiter_lines()


async def test_the_head_goes_out_when_the_engine_has_begun_to_read_the_prompt(caplog) -> None:
    caplog.set_level("INFO")
    gate = asyncio.Event()
    script = [PrefillProgress(read_tokens=1, prompt_tokens=2), gate, *text_events("A")]
    async with open_stream(script, keepalive_s=LONG_S) as (response, lines):
        assert response.status_code == 200
        gate.set()
        text = "\n".join([line async for line in lines])
    assert text.startswith("data: {")
    assert text.endswith("data: [DONE]\n")
    assert "client_left" not in caplog.text, "a stream that ends is no disconnect"


@pytest.mark.parametrize(
    ("before", "comment"),
    [
        ([], ": waiting"),
        (
            [PrefillProgress(read_tokens=2048, prompt_tokens=9000)],
            ": read 2048 of 9000 tokens of the prompt",
        ),
        ([Delta(text="A")], ": keepalive"),
    ],
)
async def test_a_silent_stream_gets_a_comment_in_each_interval(before, comment) -> None:
    gate = asyncio.Event()
    script = [*before, gate, *text_events("B")]
    async with open_stream(script, keepalive_s=0.02) as (response, lines):
        assert response.status_code == 200
        found = 0
        async for line in lines:
            found += line == comment
            if found == 3:
                gate.set()
        assert line == "", "the stream has ended"
    assert found >= 3


async def test_a_prompt_that_is_read_in_many_chunks_puts_off_no_comment() -> None:
    """A gateway takes a stream without a byte for half a minute for one whose worker hangs."""
    commented = asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            commented.set()

    stream = EventStream(send, "id", lambda: b": read 1 of 2 tokens\n\n")
    with stream.kept_alive(0.02):
        async with asyncio.timeout(10):
            while not commented.is_set():
                await stream.start()  # as each chunk does
                await asyncio.sleep(0)


async def test_a_queued_stream_tells_its_place_until_it_is_read() -> None:
    gates = asyncio.Event(), asyncio.Event()
    progress = PrefillProgress(read_tokens=1, prompt_tokens=2)
    engine = ScriptedEngine([gates[0], progress, gates[1], *text_events("B")])
    engine.place = QueuePlace(3, 12.4)
    async with open_stream(engine, keepalive_s=0.02) as (_, lines):
        async for line in lines:
            if line == ": queued 3, about 12 s":
                gates[0].set()
            elif line.startswith(": read"):
                gates[1].set()
    assert all(gate.is_set() for gate in gates)


async def test_an_error_after_an_early_head_is_an_event_with_its_code() -> None:
    gate = asyncio.Event()
    script = [gate, GenerationFailed("/private/weights")]
    async with open_stream(script, keepalive_s=0.02) as (response, lines):
        assert response.status_code == 200
        gate.set()
        events = [line async for line in lines if line.startswith("data:")]
    assert [json.loads(event[5:])["error"]["code"] for event in events] == ["generation_failed"]
