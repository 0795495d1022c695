"""A real worker whose device fails during requests, from the first error to its restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from gateway.cli.supervisor import Supervisor
from tests.support.worker_process import SUPPRESS_END_TOKENS
from workers.demo import CHECKPOINT
from workers.protocol import ExitCode

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is two plus three?"}]}
ENDLESS = QUESTION | {"max_tokens": 20_000, "logit_bias": SUPPRESS_END_TOKENS}
ANSWERS: tuple[dict[str, Any], ...] = (
    {"stream": True, "temperature": 0},
    {"stream": True, "temperature": 1, "seed": 3},
    {"stream": False, "temperature": 0},
)
"""Both lanes, streamed and not streamed."""


class Boots:
    """The messages of the supervisor over the boots of one worker."""

    def __init__(self, broken: Path) -> None:
        self.ready: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.messages: list[str] = []
        self.log: list[str] = []
        self._broken = broken

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Keep a worker with a device of its own alive inside the block."""
        arguments = (str(self._broken), "--model", str(CHECKPOINT), "--port", "0", "--leash")
        supervisor = Supervisor(
            command=(sys.executable, "-m", "tests.support.failing_device", *arguments),
            environment={"PYTHONPATH": str(ROOT)},
            on_ready=self.ready.put,
            on_exit=self._repair,
            print_line=self.messages.append,
            print_worker_line=self.log.append,
        )
        running = asyncio.create_task(supervisor.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def url(self) -> str:
        """Return where the next life listens, once it does."""
        ready = await asyncio.wait_for(self.ready.get(), PATIENCE_S)
        return str(ready["url"])

    async def _repair(self) -> None:
        self._broken.unlink()


async def test_a_dead_device_ends_every_answer_in_an_error_and_the_worker_in_its_next_life(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken"
    boots = Boots(broken)
    async with boots.supervised():
        async with httpx.AsyncClient(base_url=await boots.url(), timeout=PATIENCE_S) as client:
            before = await _asked(client)
            begun = [asyncio.Event() for _ in ANSWERS]
            requests = [
                asyncio.create_task(_read(client, fields, event))
                for fields, event in zip(ANSWERS, begun, strict=True)
            ]
            for fields, event in zip(ANSWERS, begun, strict=True):
                if fields["stream"]:
                    await event.wait()
            broken.touch()
            texts = await asyncio.gather(*requests)
        async with httpx.AsyncClient(base_url=await boots.url(), timeout=PATIENCE_S) as client:
            after = await _asked(client)

    for text in texts:
        assert "[DONE]" not in text
        assert '"finish_reason":"' not in text
        last = text.strip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] in ("engine_stopped", "generation_failed")
        assert "METAL" not in text, "the library's words stay in the log"
    died = f"ended with code {ExitCode.ENGINE_DIED.value}"
    assert [line for line in boots.messages if died in line] == [
        f"The worker {died}; it restarts in 0.5 s."
    ]
    assert any("METAL" in line for line in boots.log)
    assert after == before


async def _asked(client: httpx.AsyncClient) -> str:
    body = QUESTION | {"model": await _model(client), "temperature": 0, "max_tokens": 12}
    response = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


async def _read(client: httpx.AsyncClient, fields: dict[str, Any], begun: asyncio.Event) -> str:
    """Return the received part of an endless completion."""
    body = ENDLESS | {"model": await _model(client)} | fields
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for piece in response.aiter_text():
            text += piece
            begun.set()
    assert response.is_success == fields["stream"]
    return text


async def _model(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])
