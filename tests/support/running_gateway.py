"""Servers for tests of the gateway: a scripted worker in a thread, and a gateway in another."""

import asyncio
import contextlib
import io
import re
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import SecretStr

from gateway.assembly import TIMING, Timing
from gateway.config.settings import Settings
from gateway.event_loop import run
from gateway.server import Listening, serve
from paceline.lifecycle import Shutdown
from paceline.protocol import LaneReport
from tests.support.fake_clock import MovedClock
from tests.support.http_server import Request, ServerConnection, serve_connections
from tests.support.open_responses import CheckingTransport
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker

ADMIN_KEY = "the-admin-key-of-all-gateways"
"""The key of gateways that share a Redis; others store one in their state folder."""
HEARTBEATS = 5
"""That a worker sends until one is taken: the call back to it may come too late."""


@contextlib.contextmanager
def running_server(
    response: Callable[[ServerConnection, Request], Awaitable[None]],
    *,
    sockets: list[socket.socket],
) -> Iterator[None]:
    """Serve these sockets in a thread while the context lasts."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        end_requested = asyncio.Event()
        async with contextlib.AsyncExitStack() as listeners:
            for listener in sockets:
                await listeners.enter_async_context(serve_connections(listener, response))
            started.set_result((asyncio.get_running_loop(), end_requested))
            await end_requested.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    loop, end_requested = started.result(timeout=60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(end_requested.set)
        _await_end(thread, loop)


@contextlib.contextmanager
def running_worker(worker_id: str = "fake-a", **fields: Any) -> Iterator[ScriptedWorker]:
    """Run a scripted worker with these fields while the context lasts."""
    scripted = ScriptedWorker(worker_id, **fields)
    with running_server(scripted, sockets=[scripted.socket]):
        yield scripted


def _await_end(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> None:
    """Wait until a thread has ended; fail with its running tasks if it does not."""
    thread.join(timeout=60)
    if thread.is_alive():
        stacks = io.StringIO()
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=stacks)
        raise AssertionError(f"the thread does not end:\n{stacks.getvalue()}")


class RunningGateway:
    """A gateway in a thread, as `paceline gateway` runs it, with a client and an admin client."""

    def __init__(self, settings: Settings, timing: Timing = TIMING) -> None:
        self._settings = settings
        self.clock = timing.clock if isinstance(timing.clock, MovedClock) else MovedClock()
        """Of heartbeats, circuit breakers, claims and rates; not of connections."""
        self._timing = replace(timing, clock=self.clock)
        self.state_dir = settings.state_dir
        self._listening: Future[Listening] = Future()
        self.loop: asyncio.AbstractEventLoop
        self._shutdown: Shutdown
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.url, self.admin_url, _, settings, _ = self._listening.result(timeout=60)
        self.client = httpx.Client(base_url=self.url, timeout=60, transport=CheckingTransport())
        key = settings.admin_key
        assert key is not None
        self.admin_key = key.get_secret_value()
        headers = {"authorization": f"Bearer {self.admin_key}"}
        self.admin = httpx.Client(base_url=self.admin_url or self.url, timeout=60, headers=headers)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.admin.close()
        self.request_shutdown()
        self.request_shutdown()
        self.wait_closed()

    def request_shutdown(self) -> None:
        """Request a shutdown as a signal does: once for a drain, twice for an immediate end."""
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self._shutdown.request)

    def wait_closed(self) -> None:
        _await_end(self._thread, self.loop)

    def shut_down(self) -> None:
        self.request_shutdown()
        self.wait_closed()

    def send_heartbeat(self, worker: ScriptedWorker, **changes: Any) -> httpx.Response:
        """Send the heartbeat of a worker, which answers the gateway's call back as that boot."""
        report = worker.report(**changes)
        worker.boot_id = report.boot_id
        return self.client.put(
            f"/admin/v1/workers/{report.worker_id}",
            headers={"authorization": f"Bearer {JOIN_TOKEN}"},
            json=report.model_dump(mode="json"),
        )

    def join(self, worker: ScriptedWorker, **changes: Any) -> None:
        """Send heartbeats until one is taken, as a worker does: a call back may come too late."""
        answers = (self.send_heartbeat(worker, **changes) for _ in range(HEARTBEATS))
        assert any(answer.status_code == 200 for answer in answers), worker.worker_id

    def rejoin(self, worker: ScriptedWorker, **changes: Any) -> None:
        """Let a worker join as another boot, which has no failures."""
        self.remove_worker(worker)
        worker.boot_id += "-"
        self.join(worker, **changes)

    def remove_worker(self, worker: ScriptedWorker, **query: bool) -> httpx.Response:
        """Remove a worker, as it does at its shutdown, or its supervisor after its end."""
        path = f"/admin/v1/workers/{worker.worker_id}"
        headers = {"authorization": f"Bearer {JOIN_TOKEN}"}
        return self.client.delete(path, headers=headers, params=query)

    def join_with(self, worker: ScriptedWorker, *lanes: LaneReport, **changes: Any) -> None:
        """Let a worker join with these lanes, which it also reports whenever it is asked."""
        report = {"lanes": [lane.model_dump() for lane in lanes], **changes}
        worker.status_report = worker.report(**report)
        self.join(worker, **report)

    def chat(self, *, headers: Any = None, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(**fields), headers=headers)

    def stream(
        self, *, headers: Any = None, **fields: Any
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        body = chat_body(stream=True, **fields)
        return self.client.stream("POST", "/v1/chat/completions", json=body, headers=headers)

    def create_key(self, **terms: Any) -> dict[str, Any]:
        """Create a key as an admin; the result contains `secret`."""
        answers: list[httpx.Response] = []

        def answered() -> bool:  # Redis may take longer than the gateway waits
            # A name of its own for each try: an earlier one may have been stored all the same.
            body = {"name": f"tests {secrets.token_hex(4)}", **terms}
            answers.append(self.admin.post("/admin/v1/keys", json=body))
            return answers[-1].status_code != 503

        wait_until(answered)
        assert answers[-1].status_code == 201, answers[-1].text
        return answers[-1].json()

    def revoke_key(self, key: Mapping[str, Any]) -> dict[str, Any]:
        return self.admin.delete(f"/admin/v1/keys/{key['id']}").json()

    def use_key(self, secret: str) -> None:
        self.client.headers["authorization"] = f"Bearer {secret}"

    def use_new_key(self, **terms: Any) -> dict[str, Any]:
        """Create a key, and send it with every further request."""
        created = self.create_key(**terms)
        self.use_key(created["secret"])
        return created

    def charged_tokens(self, key: Mapping[str, Any]) -> int:
        """Return what the usage of a key has of its budget, guesses included."""
        entry = self.admin.get("/admin/v1/usage").json()["keys"].get(key["id"], {})
        names = ("prompt_tokens", "completion_tokens", "guessed_tokens")
        return sum(entry.get(name, 0) for name in names)

    def requests_in_flight(self) -> int:
        return self.status()["gateway"]["requests_in_flight"]

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        (value,) = re.findall(rf"\npaceline_{name} (\S+)", self.client.get("/metrics").text)
        return float(value)

    def memory_held_bytes(self) -> int:
        """Return what the gateway holds for clients."""
        return int(self.metric("memory_held_bytes"))

    def status(self) -> dict[str, Any]:
        return self.client.get("/v1/status").json()

    def outcomes(self) -> dict[str, int]:
        """Return the counted outcomes; none while the gateway has not read the client's key."""
        outcomes: dict[str, int] = self.status().get("outcomes", {})
        return outcomes

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self._shutdown = Shutdown()
            started = self._listening.set_result
            await serve(
                self._settings, shutdown=self._shutdown, started=started, timing=self._timing
            )

        try:
            run(main())
        except BaseException as error:
            if not self._listening.done():
                self._listening.set_exception(error)
            raise


@contextlib.contextmanager
def begun(
    streaming: contextlib.AbstractContextManager[httpx.Response],
) -> Iterator[Callable[[], bytes]]:
    """Yield, once a stream has begun, a function that reads it to its end and returns it all."""
    with streaming as response:
        pieces = response.iter_raw()
        first = next(pieces)
        yield lambda: first + b"".join(pieces)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Say a word."}], **fields}


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def bearer_headers(key: Mapping[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {key['secret']}"}


def status_and_code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def make_settings(state_dir: Path, **changes: Any) -> Settings:
    """Return settings of a gateway on a free port that a scripted worker may join.

    On a busy machine a connection may take longer than the default timeout of two seconds.
    """
    values = {"connect_timeout_s": 10.0, **changes}
    if "redis_url" in changes:
        values.setdefault("admin_key", SecretStr(ADMIN_KEY))
    values.setdefault("join_token", SecretStr(JOIN_TOKEN))
    return Settings(port=0, state_dir=state_dir, **values)


def wait_until(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Poll until a condition that has no event is true."""
    pause = threading.Event()
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("the condition did not become true")


def wait_until_all(
    gateways: Iterable[RunningGateway], condition: Callable[[RunningGateway], bool]
) -> None:
    for gateway in gateways:
        wait_until(lambda one=gateway: condition(one))  # type: ignore[misc]
