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
TIMEOUT_S = 120.0
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "What is two plus three?"}]}
ENDLESS = QUESTION | {"max_tokens": 20_000, "logit_bias": SUPPRESS_END_TOKENS}
REQUESTS: tuple[dict[str, Any], ...] = (
    {"stream": True, "temperature": 0},
    {"stream": True, "temperature": 1, "seed": 3},
    {"stream": False, "temperature": 0},
)
"""Both lanes, streamed and not streamed."""


class Boots:
    """Messages of the supervisor about all boots of one worker."""

    def __init__(self, fault_file: Path) -> None:
        self.ready: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.messages: list[str] = []
        self.log: list[str] = []
        self._fault_file = fault_file

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Run a supervised worker with a device that can fail."""
        arguments = (str(self._fault_file), "--model", str(CHECKPOINT), "--port", "0", "--leash")
        supervisor = Supervisor(
            command=(sys.executable, "-m", "tests.support.failing_device", *arguments),
            environment={"PYTHONPATH": str(ROOT)},
            on_ready=self.ready.put,
            on_exit=self._repair,
            on_progress=lambda _: None,
            print_line=self.messages.append,
            print_worker_line=self.log.append,
        )
        supervision = asyncio.create_task(supervisor.run())
        try:
            yield
        finally:
            supervision.cancel()
            await asyncio.gather(supervision, return_exceptions=True)

    async def url(self) -> str:
        """Return the address of the next boot, as soon as it is ready."""
        ready = await asyncio.wait_for(self.ready.get(), TIMEOUT_S)
        return str(ready["url"])

    async def _repair(self) -> None:
        self._fault_file.unlink()


async def test_a_failed_device_ends_every_answer_with_an_error_and_restarts_the_worker(
    tmp_path: Path,
) -> None:
    fault_file = tmp_path / "fault"
    boots = Boots(fault_file)
    async with boots.supervised():
        async with httpx.AsyncClient(base_url=await boots.url(), timeout=TIMEOUT_S) as client:
            before = await _answer(client)
            started = [asyncio.Event() for _ in REQUESTS]
            requests = [
                asyncio.create_task(_read(client, fields, event))
                for fields, event in zip(REQUESTS, started, strict=True)
            ]
            for fields, event in zip(REQUESTS, started, strict=True):
                if fields["stream"]:
                    await event.wait()
            fault_file.touch()
            texts = await asyncio.gather(*requests)
        async with httpx.AsyncClient(base_url=await boots.url(), timeout=TIMEOUT_S) as client:
            after = await _answer(client)

    for text in texts:
        assert "[DONE]" not in text
        assert '"finish_reason":"' not in text
        last = text.strip().rpartition("data: ")[2]
        assert json.loads(last)["error"]["code"] in ("engine_stopped", "generation_failed")
        assert "METAL" not in text, "the message of the library is only logged"
    exit_message = f"ended with code {ExitCode.ENGINE_DIED.value}"
    assert [line for line in boots.messages if exit_message in line] == [
        f"The worker {exit_message}; it restarts in 0.5 s."
    ]
    assert any("METAL" in line for line in boots.log)
    assert after == before


async def test_f63_answers_go_on_after_a_failed_allocation(tmp_path: Path) -> None:
    fault_file, whole = tmp_path / "fault", tmp_path / "whole"
    boots = Boots(fault_file)
    long = {"max_tokens": 60, "logit_bias": SUPPRESS_END_TOKENS, "stream": True}
    requests = [long | {"temperature": 0}, long | {"temperature": 1, "seed": 3}, long | {"seed": 4}]
    async with (
        boots.supervised(),
        httpx.AsyncClient(base_url=await boots.url(), timeout=TIMEOUT_S) as client,
    ):
        alone = [await _read(client, fields, asyncio.Event()) for fields in requests]
        started = [asyncio.Event() for _ in requests]
        reading = [
            asyncio.create_task(_read(client, fields, event))
            for fields, event in zip(requests, started, strict=True)
        ]
        await started[0].wait()
        whole.write_text("[METAL] Command buffer execution failed: Insufficient Memory (00000008)")
        whole.rename(fault_file)
        texts = await asyncio.gather(*reading)
        status = (await client.get("/v1/status")).json()["memory"]

    assert not fault_file.exists(), "one evaluation has failed"
    assert [_content(text) for text in texts] == [_content(text) for text in alone]
    assert all("[DONE]" in text for text in texts)
    assert status["failed_allocations"] == 1
    assert 0 < status["footprint_bytes"] < status["footprint_limit_bytes"]
    assert any("lane.out_of_memory" in line for line in boots.log)


def _content(text: str) -> str:
    """Return the text of a streamed answer."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data")]
    choices = [json.loads(event)["choices"] for event in events if event != "[DONE]"]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


async def _answer(client: httpx.AsyncClient) -> str:
    body = QUESTION | {"model": await _model(client), "temperature": 0, "max_tokens": 12}
    response = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


async def _read(client: httpx.AsyncClient, fields: dict[str, Any], started: asyncio.Event) -> str:
    """Return the received part of an endless completion."""
    body = ENDLESS | {"model": await _model(client)} | fields
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for piece in response.aiter_text():
            text += piece
            started.set()
    assert response.is_success == fields["stream"]
    return text


async def _model(client: httpx.AsyncClient) -> str:
    return str((await client.get("/v1/models")).json()["data"][0]["id"])
