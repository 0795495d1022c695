"""Real servers for the gateway's tests: a fake worker in a thread, and a gateway in another."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from gateway.config.settings import Settings
from gateway.server import run, serve
from tests.support.http_server import Request, ServerConnection, serve_connections
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker
from workers.lifecycle import Shutdown


@contextlib.contextmanager
def running_server(
    answer: Callable[[ServerConnection, Request], Awaitable[None]], *, sockets: list[socket.socket]
) -> Iterator[None]:
    """Answer on these sockets, in a thread, for as long as the context lasts."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        ending = asyncio.Event()
        async with contextlib.AsyncExitStack() as listeners:
            for listener in sockets:
                await listeners.enter_async_context(serve_connections(listener, answer))
            started.set_result((asyncio.get_running_loop(), ending))
            await ending.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    loop, ending = started.result(timeout=30)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ending.set)
        _await_end(thread, loop)


def _await_end(thread: threading.Thread, loop: asyncio.AbstractEventLoop) -> None:
    """Wait until a thread has ended; say what still runs in it where it does not."""
    thread.join(timeout=30)
    if thread.is_alive():
        stacks = io.StringIO()
        for task in asyncio.all_tasks(loop):
            task.print_stack(file=stacks)
        raise AssertionError(f"it does not come to its end:\n{stacks.getvalue()}")


class RunningGateway:
    """A gateway in a thread, as `paceline gateway` runs it, with a client and an admin."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._address: Future[str] = Future()
        self.admin_url = ""
        """Where admins are served, if they have a port of their own."""
        self.loop: asyncio.AbstractEventLoop
        self._shutdown: Shutdown
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunningGateway:
        self._thread.start()
        self.url = self._address.result(timeout=30)
        self.client = httpx.Client(base_url=self.url, timeout=30)
        key = self._settings.admin_key
        shown = {"authorization": f"Bearer {key.get_secret_value()}"} if key else {}
        self.admin = httpx.Client(base_url=self.admin_url or self.url, timeout=30, headers=shown)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.admin.close()
        self.request_shutdown()
        self.request_shutdown()
        self.wait_closed()

    def request_shutdown(self) -> None:
        """Ask for the end as a signal does: once for after the answers, twice for now."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self._shutdown.request)

    def wait_closed(self) -> None:
        _await_end(self._thread, self.loop)

    def send_heartbeat(self, worker: ScriptedWorker, **changes: Any) -> httpx.Response:
        """Send the heartbeat of a worker."""
        report = worker.report(**changes)
        return self.client.put(
            f"/admin/v1/workers/{report.worker_id}",
            headers={"authorization": f"Bearer {JOIN_TOKEN}"},
            json=report.model_dump(mode="json"),
        )

    def remove_worker(self, worker: ScriptedWorker) -> httpx.Response:
        """Say goodbye for a worker."""
        path = f"/admin/v1/workers/{worker.worker_id}"
        return self.client.delete(path, headers={"authorization": f"Bearer {JOIN_TOKEN}"})

    def chat(self, **fields: Any) -> httpx.Response:
        """Ask for a whole chat answer."""
        return self.client.post("/v1/chat/completions", json=chat_body(**fields))

    def stream(self, **fields: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        """Ask for a streamed chat answer."""
        body = chat_body(stream=True, **fields)
        return self.client.stream("POST", "/v1/chat/completions", json=body)

    def create_key(self, **terms: Any) -> dict[str, Any]:
        """Make a key as an admin does; `secret` is in the answer."""
        answer = self.admin.post("/admin/v1/keys", json={"name": "tests", **terms})
        if answer.status_code == 503:  # a Redis that took longer than a request may wait
            time.sleep(float(answer.headers["retry-after"]))
            answer = self.admin.post("/admin/v1/keys", json={"name": "tests", **terms})
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def use_key(self, secret: str) -> None:
        """Send this key with every request from now on."""
        self.client.headers["authorization"] = f"Bearer {secret}"

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/v1/status").json()
        return answer

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self._shutdown = Shutdown()
            await serve(
                self._settings,
                shutdown=self._shutdown,
                started=self._address.set_result,
                admin_started=lambda url: setattr(self, "admin_url", url),
            )

        try:
            run(main())
        except BaseException as error:
            if not self._address.done():
                self._address.set_exception(error)
            raise


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "Say a word."}], **fields}


def bearer_headers(key: Mapping[str, Any]) -> dict[str, str]:
    """Show the secret of a key that was just made."""
    return {"authorization": f"Bearer {key['secret']}"}


def status_and_code(answer: httpx.Response) -> tuple[int, str]:
    """Read status and code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


def make_settings(state_dir: Path, **changes: Any) -> Settings:
    """Settings of a gateway on a free port that a scripted worker may join.

    On a busy machine a connection may take longer than the two seconds of the default.
    """
    values = {"connect_timeout_s": 10.0, **changes}
    return Settings(port=0, join_token=SecretStr(JOIN_TOKEN), state_dir=state_dir, **values)


def wait_until(holds: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Wait until something observed from outside holds; the only wait that has no event."""
    waited = threading.Event()
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if holds():
            return
        waited.wait(0.02)
    raise AssertionError("it never came true")
