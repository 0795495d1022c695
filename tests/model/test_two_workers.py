"""Two workers behind one gateway: they share the load, and one may crash."""

import asyncio
import contextlib
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from paceline.http import paired_tls
from tests.support.openai_requests import TEXT, text_body
from tests.support.paceline_process import TIMEOUT_S
from tests.support.pairing import Paired, paired
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.served_engine import running_gateway, served
from tests.support.worker_process import RunningWorker, running_worker
from workers.engine.engine import Engine
from workers.engine.prefix.cache import MIN_TOKENS

STREAMS = 12
QUESTION = "Count from 1 to 60."


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    gateway: RunningGateway
    workers: dict[str, RunningWorker]
    process: subprocess.Popen[str]
    """Of the worker `a`."""
    pairings: dict[str, Paired]

    def client_at(self, worker_id: str) -> httpx.Client:
        """Return a client of the port of a worker, with its own certificate and token."""
        pairing, tls = self.pairings[worker_id], paired_tls()
        tls.check_hostname = False
        pairing.identity.load(tls)
        headers = {"authorization": f"Bearer {pairing.pairing.token}"}
        url = self.workers[worker_id].url
        return httpx.Client(base_url=url, timeout=60, headers=headers, verify=tls)

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def model(self) -> str:
        return next(iter(self.workers.values())).model


@dataclass(slots=True, kw_only=True)
class Stream:
    worker: str
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.events[-1] == "[DONE]" and not any('"error"' in event for event in self.events)

    @property
    def text(self) -> str:
        choices = [json.loads(event)["choices"] for event in self.events[:-1]]
        return "".join(one[0]["delta"].get("content") or "" for one in choices if one)


@pytest.fixture(scope="module")
def fleet(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yield a gateway with a worker process, which the last test kills, and the engine of here.

    Both have paired with the gateway.
    """
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(tmp_path_factory.mktemp("fleet")))
        folders = {name: tmp_path_factory.mktemp(name) for name in ("a", "b")}
        pairings = {name: paired(gateway, folder, name) for name, folder in folders.items()}
        state = {"PACELINE_STATE_DIR": str(folders["a"])}
        a = stack.enter_context(running_worker("--join", gateway.url, environment=state))
        b = stack.enter_context(served(engine, "b", join=gateway.url, paired=pairings["b"]))
        wait_until_joined(gateway, {"a", "b"})
        workers = {"a": a, "b": b}
        yield Fleet(gateway=gateway, workers=workers, process=a.process, pairings=pairings)


def wait_until_joined(gateway: RunningGateway, expected: set[str]) -> None:
    """Wait until exactly these workers are members of the fleet, and have started."""

    def worker_ids() -> set[str]:
        response = gateway.admin.get("/admin/v1/workers").raise_for_status()
        workers = response.json()["workers"]
        absent = ("gone", "starting")
        return {worker["worker_id"] for worker in workers if worker["state"] not in absent}

    wait_until(lambda: worker_ids() == expected, within_s=TIMEOUT_S)


@contextlib.contextmanager
def cordoned(fleet: Fleet, worker_id: str) -> Iterator[None]:
    """Let a worker take no new request in the context."""
    cordon = f"/admin/v1/workers/{worker_id}/cordon"
    fleet.gateway.admin.put(cordon).raise_for_status()
    try:
        yield
    finally:
        fleet.gateway.admin.delete(cordon).raise_for_status()


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient, fleet: Fleet) -> AsyncIterator[Stream]:
    """Open a long streamed answer, which a task reads while the block runs."""
    body = text_body(fleet.model, QUESTION, temperature=0, stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        stream = Stream(worker=response.headers["x-paceline-worker"])
        reader = asyncio.create_task(read(response, stream))
        try:
            yield stream
            await reader
        finally:
            reader.cancel()


async def read(response: httpx.Response, stream: Stream) -> None:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            stream.events.append(line.removeprefix("data: "))
            stream.begun.set()
    stream.ended.set()


@contextlib.asynccontextmanager
async def many_streams(client: httpx.AsyncClient, fleet: Fleet) -> AsyncIterator[list[Stream]]:
    """Open all streams at once, and wait until each of them has begun."""
    async with contextlib.AsyncExitStack() as stack:
        streams = await asyncio.gather(
            *(stack.enter_async_context(streaming(client, fleet)) for _ in range(STREAMS))
        )
        for stream in streams:
            await stream.begun.wait()
        yield streams


def client_of(fleet: Fleet) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=fleet.url, timeout=120, limits=limits)


async def test_a_worker_without_heartbeats_is_removed_until_its_next_one(fleet: Fleet) -> None:
    """It falls asleep, and its stream goes on at the other worker."""
    async with client_of(fleet) as client, contextlib.AsyncExitStack() as stack:
        with cordoned(fleet, "b"):
            stream = await stack.enter_async_context(streaming(client, fleet))
        await stream.begun.wait()
        assert stream.worker == "a"
        fleet.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.to_thread(wait_until_joined, fleet.gateway, {"b"})
            await asyncio.wait_for(stream.ended.wait(), TIMEOUT_S)
        finally:
            fleet.process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(wait_until_joined, fleet.gateway, {"a", "b"})
    assert stream.complete


def test_each_turn_of_a_conversation_runs_where_the_last_one_was(fleet: Fleet) -> None:
    """The usage of the worker shows that it read the new message alone."""
    with httpx.Client(base_url=fleet.url, timeout=60) as client:
        not_reused = client.get("/v1/status").raise_for_status().json()["prefix"]["not_reused"]
        for number in range(2):
            question = f"Chat {number}. {TEXT} " + 60 * "Ships come in with the tide. "
            messages = [{"role": "user", "content": question}]
            workers, earlier_tokens = set(), 0
            for turn in range(3):
                body = {"model": fleet.model, "messages": messages, "max_tokens": 12}
                response = client.post("/v1/chat/completions", json=body).raise_for_status()
                workers.add(response.headers["x-paceline-worker"])
                assert len(workers) == 1
                answer, usage = response.json()["choices"][0]["message"], response.json()["usage"]
                cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
                assert 0.9 * earlier_tokens <= cached_tokens <= earlier_tokens
                assert response.headers["x-paceline-prefix"] == ("hit" if turn else "miss")
                earlier_tokens = usage["prompt_tokens"] + usage["completion_tokens"]
                messages += [answer, {"role": "user", "content": f"And then, {turn}?"}]
        prefix = client.get("/v1/status").raise_for_status().json()["prefix"]
    assert prefix["tokens_by_kind"]["conversation"] > 0
    assert prefix["not_reused"] == not_reused


def reused_tokens(fleet: Fleet, worker_id: str) -> Counter[str]:
    """Return how many tokens a worker has not read again, by kind."""
    with fleet.client_at(worker_id) as client:
        lanes = client.get("/v1/status").raise_for_status().json()["lanes"]
    kinds: Counter[str] = Counter()
    for lane in lanes.values():
        kinds.update(lane["prefix"]["tokens_by_kind"])
    return kinds


def test_a_conversation_goes_on_where_its_worker_is_drained(fleet: Fleet) -> None:
    """The other worker takes the earlier turns, and answers as if it had read them."""
    story = "The red fox sees the old tree and the blue boat finds the warm stone. " * 80
    body = {"model": fleet.model, "temperature": 0, "max_tokens": 4}
    before = {name: reused_tokens(fleet, name) for name in fleet.workers}
    with httpx.Client(base_url=fleet.url, timeout=60) as client:

        def ask() -> httpx.Response:
            fields = {**body, "messages": messages}
            return client.post("/v1/chat/completions", json=fields).raise_for_status()

        for attempt in range(200):  # for a minute after a stall, moving takes longer than reading
            messages = [{"role": "user", "content": f"Story {attempt}. {story}"}]
            first = ask()
            holder = first.headers["x-paceline-worker"]
            with cordoned(fleet, holder):
                answer = first.json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": answer}]
                messages += [{"role": "user", "content": "And then?"}]
                second = ask()
            if second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]:
                break
    taker = second.headers["x-paceline-worker"]
    assert taker != holder
    cached_tokens = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    first_prompt_tokens = first.json()["usage"]["prompt_tokens"]
    reused = reused_tokens(fleet, taker) - before[taker]
    assert reused.total() == cached_tokens >= first_prompt_tokens
    assert cached_tokens - reused["moved"] < MIN_TOKENS, "of other chats: too few to start from"
    with fleet.client_at(taker) as client:
        cold = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "of another scope"
    assert second.json()["choices"] == cold["choices"]


async def test_f03_the_streams_of_a_killed_worker_go_on_at_the_other_one(fleet: Fleet) -> None:
    """The last test of this file, because it kills a worker of the fleet."""
    async with client_of(fleet) as client:
        before = (await client.get("/v1/status")).json()["failovers"]
        async with many_streams(client, fleet) as streams:
            fleet.process.send_signal(signal.SIGKILL)
        assert {stream.worker for stream in streams} == {"a", "b"}
        assert all(stream.complete for stream in streams)
        assert {stream.text for stream in streams} == {streams[0].text}
        status = (await client.get("/v1/status")).json()
        assert status["failovers"] - before == sum(stream.worker == "a" for stream in streams)
        body = text_body(fleet.model, "Hello!", temperature=0)
        for _ in range(2):
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            assert response.headers["x-paceline-worker"] == "b"
