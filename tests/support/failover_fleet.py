"""A gateway and two workers on one engine, behind proxies that cut their streams."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from tests.support.fault_proxy import NO_FAULT, Fault, FaultProxy, running_proxy
from tests.support.running_gateway import RunningGateway, make_settings
from tests.support.scripted_engine import serve_app
from tests.support.scripted_worker import JOIN_TOKEN
from workers.server.app import create_app
from workers.server.runtime import Worker

CHAT = "/v1/chat/completions"
CREATED_S = 1764000000.0
"""The wall time of the workers."""


@dataclass(slots=True)
class Answer:
    """What a client has read of a stream, whatever its events were."""

    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, list[dict[str, str]]] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    sources: dict[int, list[Any]] = field(default_factory=dict)
    roles: int = 0
    finishes: list[tuple[int, str]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    error: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """Return all that must not depend on where the stream was cut.

        Which tokens are drafts does, since the steps of the second worker begin elsewhere.
        """
        return {
            "texts": self.texts,
            "calls": self.calls,
            "logprobs": self.logprobs,
            "sources": {at: [one["text"] for one in each] for at, each in self.sources.items()},
            "roles": self.roles,
            "finishes": sorted(self.finishes),
            "usage": {key: self.usage.get(key) for key in ("prompt_tokens", "completion_tokens")},
            "done": self.done,
            "error": self.error,
        }

    def read(self, received: bytes) -> "Answer":
        for block in received.split(b"\n\n"):
            lines = [line for line in block.split(b"\n") if line.startswith(b"data: ")]
            for line in lines:
                self._add(line.removeprefix(b"data: "))
        return self

    def _add(self, data: bytes) -> None:
        assert not self.done, "nothing follows the end"
        if data == b"[DONE]":
            self.done = True
            return
        frame = json.loads(data)
        if "error" in frame:
            self.error = frame["error"]["code"]
            return
        self.ids.add(frame["id"])
        self.created.add(frame["created"])
        if frame.get("usage"):
            assert not self.usage, "the usage comes once"
            self.usage = frame["usage"]
            self.metrics = frame.get("metrics") or {}
        for choice in frame["choices"]:
            self._add_choice(choice["index"], choice)

    def _add_choice(self, index: int, choice: Mapping[str, Any]) -> None:
        delta = choice["delta"]
        self.roles += "role" in delta
        self.texts[index] = self.texts.get(index, "") + (delta.get("content") or "")
        for call in delta.get("tool_calls") or ():
            known = self.calls.setdefault(index, [])
            if call["index"] == len(known):
                known.append({"name": call["function"]["name"], "arguments": ""})
            known[call["index"]]["arguments"] += call["function"].get("arguments") or ""
        if choice.get("logprobs"):
            self.logprobs.setdefault(index, []).extend(
                (one["token"], round(one["logprob"], 3)) for one in choice["logprobs"]["content"]
            )
        self.sources.setdefault(index, []).extend(choice.get("token_sources") or ())
        if choice.get("finish_reason"):
            self.finishes.append((index, choice["finish_reason"]))


@dataclass(slots=True, kw_only=True)
class ServedWorker:
    """A worker behind a proxy, whose address its reports have."""

    worker: Worker
    proxy: FaultProxy


@contextlib.asynccontextmanager
async def serving(engine: Any, name: str) -> AsyncIterator[ServedWorker]:
    with running_proxy("http://127.0.0.1:1") as proxy:
        worker = Worker(
            worker_id=name,
            boot_id=f"boot-{name}",
            url=proxy.url,
            engine=engine,
            clock=lambda: CREATED_S,
            started_s=CREATED_S,
        )
        async with serve_app(create_app(worker, SecretStr(JOIN_TOKEN))) as url:
            proxy.target_port = int(url.rpartition(":")[2])
            yield ServedWorker(worker=worker, proxy=proxy)


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A gateway and two workers, `a` and `b`."""

    gateway: RunningGateway
    workers: Mapping[str, ServedWorker]
    client: httpx.AsyncClient

    @property
    def faults(self) -> int:
        """Return the number of answers that were cut so far."""
        return sum(served.proxy.faults for served in self.workers.values())

    async def join(self, name: str, **changes: Any) -> None:
        report = self.workers[name].worker.report().model_copy(update=changes)
        response = await self.client.put(
            f"/admin/v1/workers/{name}",
            headers={"authorization": f"Bearer {JOIN_TOKEN}"},
            json=report.model_dump(mode="json"),
        )
        assert response.status_code == 200, response.text

    async def ask(
        self, path: str, body: Mapping[str, Any], fault: Fault = NO_FAULT, *, first: str = "a"
    ) -> httpx.Response:
        """Return a response that one worker begins, whose connection has a fault.

        A worker that fails five times in a row would be ejected, so they take turns.
        """
        for name, served in self.workers.items():
            lanes = served.worker.report().lanes
            # As if other gateways had queued requests at the other worker.
            waiting = 0 if name == first else 40
            lanes = tuple(lane.model_copy(update={"waiting": waiting}) for lane in lanes)
            await asyncio.to_thread(served.proxy.reset_all)
            served.proxy.fault = NO_FAULT
            await self.join(name, lanes=lanes)
        await asyncio.to_thread(self.workers[first].proxy.reset_all)
        self.workers[first].proxy.fault = fault
        response = await self.client.post(path, json=body, headers={"x-request-id": "r"})
        assert response.status_code == 200, response.text
        return response


@contextlib.asynccontextmanager
async def running_fleet(engine: Any, folder: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        workers = {
            name: await stack.enter_async_context(serving(engine, name)) for name in ("a", "b")
        }
        gateway = RunningGateway(make_settings(folder))
        await asyncio.to_thread(gateway.__enter__)
        stack.push_async_callback(asyncio.to_thread, gateway.__exit__)
        client = httpx.AsyncClient(base_url=gateway.url, timeout=60)
        client = await stack.enter_async_context(client)
        yield Fleet(gateway=gateway, workers=workers, client=client)


def check_drafts(answer: Answer) -> None:
    """Check that the draft counts of two workers add up, if they have drafted."""
    drafts = answer.metrics.get("speculative_decoding")
    if drafts is None:
        return
    assert sum(drafts["acceptance_histogram"]) == drafts["num_spec_steps"]
    accepted = [at * steps for at, steps in enumerate(drafts["acceptance_histogram"])]
    assert sum(accepted) == drafts["num_accepted_draft_tokens"] <= drafts["num_draft_tokens"]
    if "per_step_drafted" in drafts:
        assert sum(drafts["per_step_drafted"]) == drafts["num_draft_tokens"]
        assert sum(drafts["per_step_accepted"]) == drafts["num_accepted_draft_tokens"]
