"""A real worker whose device fails during requests, from the first error to its restart."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from gateway.cli.supervisor import Supervisor
from paceline.protocol import ExitCode
from tests.support.worker_process import SUPPRESS_END_TOKENS
from workers.demo import CHECKPOINT

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


async def test_f63_answers_go_on_after_a_failed_allocation_and_a_failed_device_ends_them(
    tmp_path: Path,
) -> None:
    """Each answer ends with an error then, and the worker is started again."""
    fault_file = tmp_path / "fault"
    boots = Boots(fault_file)
    async with boots.supervised():
        async with httpx.AsyncClient(base_url=await boots.url(), timeout=TIMEOUT_S) as client:
            await _check_failed_allocation(client, fault_file)
            assert any("lane.out_of_memory" in line for line in boots.log)
            before = await _answer(client)
            texts = await _answers_with_fault(client, REQUESTS, fault_file.touch)
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
    assert any("METAL" in line and "Internal Error" in line for line in boots.log)
    assert after == before


async def _check_failed_allocation(client: httpx.AsyncClient, fault_file: Path) -> None:
    long = {"max_tokens": 60, "logit_bias": SUPPRESS_END_TOKENS, "stream": True}
    requests = [long | {"temperature": 0}, long | {"temperature": 1, "seed": 3}, long | {"seed": 4}]
    alone = [await _read(client, fields, asyncio.Event()) for fields in requests]

    def fail_once() -> None:
        whole = fault_file.with_suffix(".whole")
        whole.write_text("[METAL] Command buffer execution failed: Insufficient Memory (00000008)")
        whole.rename(fault_file)

    texts = await _answers_with_fault(client, requests, fail_once)
    status = (await client.get("/v1/status")).json()["memory"]
    assert [_content(text) for text in texts] == [_content(text) for text in alone]
    assert all("[DONE]" in text for text in texts)
    assert status["failed_allocations"] == 1
    assert 0 < status["footprint_bytes"] < status["footprint_limit_bytes"]


async def _answers_with_fault(
    client: httpx.AsyncClient, requests: Sequence[dict[str, Any]], fail: Callable[[], None]
) -> list[str]:
    """Return the received parts of answers, after a fault once all streams have begun."""
    started = [asyncio.Event() for _ in requests]
    reading = [
        asyncio.create_task(_read(client, fields, event))
        for fields, event in zip(requests, started, strict=True)
    ]
    for fields, event in zip(requests, started, strict=True):
        if fields["stream"]:
            await event.wait()
    fail()
    return await asyncio.gather(*reading)


def _content(text: str) -> str:
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
