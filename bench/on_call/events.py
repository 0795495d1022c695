"""Ten events, each with what the page, the command, the log and a metric say of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx

from bench.harness.parts import wait_until_up
from bench.on_call.fleet import ENGINE, WORKERS, OnCall
from gateway.periodic import Job, periodic_tasks
from tests.support.scripted_worker import Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MINI, STUDIO = WORKERS
PLACES: Final = ("page", "command", "log", "metric")
LIVE: Final = "/dashboard"
_STATUS: Final = ("status",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event; each of its patterns must be found within ten seconds of its beginning."""

    name: str
    happening: Callable[[OnCall], AbstractAsyncContextManager[None]]
    """A context: the event begins when it is entered, and all is well again at its end."""
    page: str
    command: str
    log: str
    metric: str
    path: str = LIVE
    pictured: str = ""
    """The page of the picture; the same as `path` by default."""
    arguments: tuple[str, ...] = _STATUS

    def pattern(self, place: str) -> str:
        return str(getattr(self, place))


@asynccontextmanager
async def _worker_killed(fleet: OnCall) -> AsyncIterator[None]:
    await fleet.parts[STUDIO].kill()
    yield
    await fleet.start_worker(STUDIO)
    await fleet.wait_until_ready(STUDIO)


@asynccontextmanager
async def _stopped(process_id: int) -> AsyncIterator[None]:
    os.killpg(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(process_id, signal.SIGCONT)


@asynccontextmanager
async def _asleep(fleet: OnCall) -> AsyncIterator[None]:
    async with _stopped(fleet.parts[MINI].pid):
        yield
    await fleet.wait_until_ready(MINI)


@asynccontextmanager
async def _redis_frozen(fleet: OnCall) -> AsyncIterator[None]:
    fleet.redis.freeze()
    try:
        yield
    finally:
        fleet.redis.resume()
    await _wait_for_store(fleet)


@asynccontextmanager
async def _disk_full(fleet: OnCall) -> AsyncIterator[None]:
    filler = fleet.state / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while file.write(bytes(4096)):
            file.flush()
    try:
        yield
    finally:
        filler.unlink()
    await _wait_for_store(fleet)


async def _wait_for_store(fleet: OnCall) -> None:
    async with asyncio.timeout(60):
        while (await fleet.client.get("/v1/status")).json()["store"]["state"] != "ok":
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _key_leaked(fleet: OnCall) -> AsyncIterator[None]:
    key = await fleet.admin("POST", "keys", {"name": "leaked"})
    await fleet.admin("DELETE", f"keys/{key['id']}")
    headers = {"authorization": f"Bearer {key['secret']}"}
    for _ in range(5):
        answer = await fleet.chat(headers=headers)
        assert answer.status_code == httpx.codes.UNAUTHORIZED
    yield


@asynccontextmanager
async def _flood(fleet: OnCall) -> AsyncIterator[None]:
    key = await fleet.admin("POST", "keys", {"name": "flooder"})
    headers = {"authorization": f"Bearer {key['secret']}"}

    async def ask() -> None:
        await fleet.chat(headers=headers, max_tokens=64)

    async with periodic_tasks([Job(work=ask, period_s=0)] * 60):
        yield
    await fleet.admin("DELETE", f"keys/{key['id']}")


@asynccontextmanager
async def _gateway_restarted(fleet: OnCall) -> AsyncIterator[None]:
    """Kill the gateway under requests, each of which gets an answer once it is up again."""
    await fleet.gateway.kill()
    await fleet.gateway.start()
    await wait_until_up(fleet.port)
    answer = await fleet.chat()
    assert answer.is_success, f"the first request after the restart gets {answer.text}"
    yield
    await fleet.wait_until_ready(*WORKERS, ENGINE)


@asynccontextmanager
async def _wrong_policy(fleet: OnCall) -> AsyncIterator[None]:
    before = fleet.policy.read_text()
    fleet.policy.write_text(before.replace("to: [vlm]", "too: [vlm]"))
    try:
        yield
    finally:
        fleet.policy.write_text(before)


@asynccontextmanager
async def _taken_id(fleet: OnCall) -> AsyncIterator[None]:
    await fleet.start_worker(MINI, part="impostor")
    async with asyncio.timeout(60):
        while not fleet.log_size("impostor"):  # the start of Python is not of interest
            await asyncio.sleep(0.05)
    try:
        yield
    finally:
        await fleet.parts.pop("impostor").stop()


@asynccontextmanager
async def _engine_fails(fleet: OnCall) -> AsyncIterator[None]:
    refusal = b'{"error": {"message": "busy"}}'
    fleet.engine.script = Script(status=429, body=refusal, headers=((b"retry-after", b"20"),))
    asking = asyncio.create_task(fleet.chat(model="qwen"))
    try:
        yield
    finally:
        fleet.engine.script = Script()
        await asking


def _gone(
    event: str, happening: Callable[[OnCall], AbstractAsyncContextManager[None]], name: str
) -> Event:
    """Return the event that a worker is silent."""
    return Event(
        name=event,
        happening=happening,
        page=f"{name} has sent nothing since .*asleep",
        command=f"{name} has sent nothing since",
        log=f"fleet.lost worker={name} kind=silent",
        metric=rf'paceline_worker_available{{worker="{name}"}} 0\.0',
    )


EVENTS: Final = (
    _gone("a worker is killed", _worker_killed, STUDIO),
    _gone("a Mac falls asleep", _asleep, MINI),
    Event(
        name="Redis freezes",
        happening=_redis_frozen,
        page="Redis does not answer in time",
        command="Redis does not answer in time",
        log="redis.degraded .*Redis does not answer",
        metric=r"paceline_store_degraded 1\.0",
    ),
    Event(
        name="the disk is full",
        happening=_disk_full,
        page="cannot be written: No space left",
        command="cannot be written: No space left",
        log="records.unwritable .*No space left",
        metric=r"paceline_state_unwritable 1\.0",
    ),
    Event(
        name="a revoked key is used",
        happening=_key_leaked,
        page="revoked",
        command="revoked",
        arguments=("errors",),
        pictured="/admin#keys",
        log="key.ended_in_use",
        metric=r'paceline_errors_total{code="ended_api_key"} [1-9]',
    ),
    Event(
        name="one key floods the fleet",
        happening=_flood,
        page="flooder",
        command="flooder",
        log="queue.flooded",
        metric=r"paceline_pool_waiting{[^}]*} [1-9]",
    ),
    Event(
        name="a gateway restarts",
        happening=_gateway_restarted,
        page=r"Uptime\s+[0-9.]+ ?m?s\b",
        command=r"ready, up for [0-9]+ s",
        log="Paceline listens on",
        metric="paceline_start_time_seconds",
    ),
    Event(
        name="a policy file is wrong",
        happening=_wrong_policy,
        pictured="/admin#policy",
        page="did you mean 'to'",
        command="The policy file is not active",
        log="policy_file.rejected",
        metric=r"paceline_policy_file_refused 1\.0",
    ),
    Event(
        name="a worker starts with a taken id",
        happening=_taken_id,
        pictured="/admin#workers",
        page=f"{MINI}: Another worker has started with the same id",
        command=f"{MINI} has a problem: Another worker has started with the same id",
        log=f"fleet.id_taken worker={MINI}",
        metric=rf'paceline_worker_id_taken{{worker="{MINI}"}} 1\.0',
    ),
    Event(
        name="an engine answers 429",
        happening=_engine_fails,
        pictured="/admin#workers",
        page=f"{ENGINE}.{{0,40}}busy",
        command=f"{ENGINE} busy",
        log=f"worker.busy worker={ENGINE}",
        metric=rf'paceline_worker_available{{worker="{ENGINE}"}} 0\.0',
    ),
)
