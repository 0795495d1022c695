"""Run the gateway in this process and one worker as its child: an endpoint in one command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.text import Text

from gateway import event_loop
from gateway.cli import gateway as serve
from gateway.cli.supervisor import Supervisor
from gateway.config.settings import Settings
from gateway.config.startup_checks import local_url, network_url, secret_source
from gateway.server import Listening, restart_if_requested, settle_interpreter
from gateway.server import serve as serve_gateway
from paceline.addresses import is_loopback
from paceline.lifecycle import Shutdown
from paceline.names import name_of_host
from paceline.protocol import StartProgress
from paceline.terminal import TERMINAL_VARIABLE, StartDisplay, printable

_REQUEST_TIMEOUT_S = 2.0
_JOIN_POLL_S = 0.05
_CORDON_POLL_S = 1.0
# The demo model was trained on this question.
_QUESTION = "Count from 1 to 20."
_READY = """\
Paceline is ready on {address} (model {model}).

Ask it a question:
    {key}{command} ask "{question}"{at}
    curl {local}/v1/chat/completions -H 'content-type: application/json'{header} -d {body}

Start page: {local} (with code to copy for your programs)
Live page: {local}/dashboard
Admin page: {admin_page}

"""
_JOIN = """\
To join another Mac, run `paceline join` there and enter the code that this command shows:
    {command} workers pair{at}
Or run there, with the join token,
    PACELINE_JOIN_TOKEN={token} {command} worker --join {address} --model NAME"""
_OPEN_UNKEYED = """\
Only this machine can use it so far. To use more Macs:
  1. Create an API key; all clients need one from then on:
         {command} keys create NAME{at}
  2. Restart it for your network; it then prints the command that joins a Mac:
         {command} up --host 0.0.0.0{flags}"""
_OPEN_KEYED = """\
Only this machine can use it so far. To use more Macs, restart it for your network; it then prints
the command that joins a Mac:
    {command} up --host 0.0.0.0{flags}"""

_CONSOLE = Console(highlight=False, soft_wrap=True)


def run(*, settings: Settings, model: str | None, config: str | None) -> int:
    """Run until Ctrl-C or SIGTERM; return 1 if the worker cannot run."""
    settle_interpreter()
    worker_flags = (
        *(("--model", model) if model else ()),
        *(("--config", config) if config else ()),
    )
    exit_code = event_loop.run(_serve(settings, worker_flags))
    restart_if_requested()
    return exit_code


async def _serve(settings: Settings, worker_flags: Sequence[str]) -> int:
    shutdown = Shutdown()
    with shutdown.on_signals(restarts=True):
        started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
        gateway = asyncio.create_task(
            serve_gateway(settings, shutdown=shutdown, started=started.set_result), name="gateway"
        )
        first: set[asyncio.Future[Any]] = {gateway, started}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await gateway  # raises the error that prevented the start
            return 0
        listening = started.result()
        if listening.admin_url:
            _print(f"The admin port listens on {listening.admin_url}.")
        _print(f"Gateway listens on {listening.url}.")
        shutdown_notice = asyncio.create_task(
            serve.announce_shutdown(shutdown, listening.running_requests, _print)
        )
        runner = _WorkerRunner(given=settings, worker_flags=worker_flags, listening=listening)
        worker = asyncio.create_task(runner.run(), name="worker")
        try:
            await asyncio.wait({gateway, worker}, return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                _print(f"Paceline ends: {worker.result()}.")
                shutdown.request()
            await gateway  # before the worker: running streams end first
            return 1 if worker.done() else 0
        finally:
            # From here on the worker only logs that the gateway is gone.
            runner.muted = True
            worker.cancel()
            shutdown_notice.cancel()
            await asyncio.wait({worker, shutdown_notice})
            _print("Ended.")


def _print(text: str, style: str = "") -> None:
    _CONSOLE.print(Text(printable(text), style=style))


@dataclass(slots=True, kw_only=True)
class _WorkerRunner:
    """Starts the worker of this `up`, and prints the ready message once."""

    given: Settings
    """The settings without the stored secrets."""
    worker_flags: Sequence[str]
    """Flags that the worker gets besides those of its place."""
    listening: Listening
    greeted: bool = False
    muted: bool = False
    start: StartDisplay = field(default_factory=lambda: StartDisplay(_CONSOLE))

    async def run(self) -> str:
        """Run the worker; return the reason why it cannot run."""
        gateway_url = self._local_address
        name = name_of_host(socket.gethostname()) or "local"
        command = (
            *(sys.executable, "-P", "-m", "workers", "--leash", "--port", "0"),
            *("--id", name, "--join", gateway_url),
            *self.worker_flags,
        )
        async with httpx.AsyncClient(
            base_url=f"{gateway_url}/admin/v1/workers",
            headers={"authorization": f"Bearer {self._join_token}"},
            timeout=_REQUEST_TIMEOUT_S,
            trust_env=False,
        ) as client:
            return await Supervisor(
                command=command,
                # `ps` shows arguments to everybody, so the environment carries the token.
                environment={
                    "PACELINE_JOIN_TOKEN": self._join_token,
                    "PYTHONUNBUFFERED": "1",
                    TERMINAL_VARIABLE: "yes" if sys.stdout.isatty() else "",
                },
                on_ready=functools.partial(self._greet, client),
                on_exit=functools.partial(_remove_worker, client, name),
                on_progress=self._show_start,
                print_line=_print,
                print_worker_line=self._print_worker_line,
            ).run()

    @property
    def _port(self) -> int:
        return urlsplit(self.listening.url).port or 0

    @property
    def _local_address(self) -> str:
        return local_url(self.given.host, self._port)

    @property
    def _join_token(self) -> str:
        token = self.listening.settings.join_token
        return token.get_secret_value() if token else ""

    def _print_worker_line(self, line: str) -> None:
        if not self.muted:
            _print(f"worker | {line}", style="dim")

    def _show_start(self, progress: StartProgress | None) -> None:
        if progress is None or self.muted:
            self.start.close()
        else:
            self.start.show(progress)

    async def _greet(self, client: httpx.AsyncClient, ready: Mapping[str, Any]) -> None:
        """Print the ready message once the worker gets requests, so that the snippet works."""
        told = ""
        while author := await _wait_until_joined(client, ready["worker_id"], ready["url"]):
            if author != told:
                told, page = author, serve.admin_page(self.given, self.listening)
                _print(f"The worker gets no requests: {author} has cordoned it. See {page}")
            await asyncio.sleep(_CORDON_POLL_S)
        if self.greeted:
            _print("The worker is ready again.")
        else:
            self.greeted = True
            _print(f"\n{self._ready_message(ready['model'])}\n")

    def _ready_message(self, model: str) -> str:
        """Return the address, two ways to ask a question, the pages, and the next step."""
        keyed, local_only = self.listening.keyed, is_loopback(self.given.host)
        # The shell may not find `paceline`; a service is run by a module.
        named = shutil.which("paceline") or sys.argv[0].endswith("__main__.py")
        command = "paceline" if named else os.path.relpath(sys.argv[0])
        messages = [{"role": "user", "content": _QUESTION}]
        body = {"model": model, "temperature": 0, "messages": messages}
        address = network_url(self.given.host, self._port)
        # The commands that follow find this gateway, and a restart serves the same model.
        own_port = self.given.port != Settings.model_fields["port"].default
        at = f" --url {self._local_address}" if own_port else ""
        port_flags = ("--port", str(self._port)) if own_port else ()
        flags = "".join(f" {shlex.quote(flag)}" for flag in (*port_flags, *self.worker_flags))
        ready = _READY.format(
            address=address,
            local=self._local_address,
            model=model,
            command=command,
            question=_QUESTION,
            key="PACELINE_API_KEY=pk-... " if keyed else "",
            header=' -H "authorization: Bearer $PACELINE_API_KEY"' if keyed else "",
            body=shlex.quote(json.dumps(body)),
            at=at,
            admin_page=serve.admin_page(self.given, self.listening),
        )
        if local_only:
            opening = _OPEN_KEYED if keyed else _OPEN_UNKEYED
            return ready + opening.format(command=command, at=at, flags=flags)
        # The readers of a pipe or a log may not join workers.
        terminal = sys.stdout.isatty()
        token = self._join_token if terminal else "TOKEN"
        joining = _JOIN.format(command=command, address=address, token=token, at=at)
        place = f"\nThe join token: {secret_source(self.given, 'join_token')}"
        return ready + joining + ("" if terminal else place)


async def _remove_worker(client: httpx.AsyncClient, name: str) -> None:
    """Remove a dead worker at once, so that its next process can join under the same id."""
    with contextlib.suppress(httpx.HTTPError):
        await client.delete(f"/{name}", params={"restarting": "true"})


async def _wait_until_joined(client: httpx.AsyncClient, name: str, worker_url: str) -> str:
    """Return who has cordoned the worker; empty if nobody has."""
    while True:
        with contextlib.suppress(httpx.HTTPError):  # the gateway may be shutting down
            response = await client.get(f"/{name}/joined")
            if response.is_success and response.json()["url"] == worker_url:
                return str(response.json()["cordoned_by"])
        await asyncio.sleep(_JOIN_POLL_S)
