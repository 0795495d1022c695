"""Run the gateway in this process and one worker as its child: an endpoint in one command."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.text import Text

from gateway.cli import gateway as serve
from gateway.cli.supervisor import Supervisor
from gateway.config.settings import Settings
from gateway.config.startup_checks import local_url, secret_source
from gateway.server import Listening, settle_collector
from gateway.server import run as run_loop
from gateway.server import serve as serve_gateway
from workers.lifecycle import Shutdown
from workers.protocol import base_url, is_loopback
from workers.terminal import printable

_REQUEST_TIMEOUT_S = 2.0
_JOIN_POLL_S = 0.05
_SNIPPET = """\
from openai import OpenAI

client = OpenAI(base_url="{address}/v1", api_key={api_key})
answer = client.chat.completions.create(
    model="{model}",
    temperature=0,  # greedy text takes the speculative lane
    messages=[{{"role": "user", "content": "{question}"}}],
)
print(answer.choices[0].message.content)"""

# The demo model was trained on this question.
_QUESTION = "Count from 1 to 20."
_JOIN = """\
Another Mac joins with
    {command} worker --join {address} --token {token} --model NAME"""
_OPEN_FIRST = """\
The gateway accepts requests from this machine only. To open it to other Macs, create an API key and
restart it:
    {command} keys create NAME
    {command} up --host 0.0.0.0"""

_CONSOLE = Console(highlight=False, soft_wrap=True)


def run(*, model: str | None, config: str | None, **flags: str | None) -> int:
    """Run until Ctrl-C or SIGTERM; return 1 if the worker cannot run."""
    settings = serve.read_settings(config=config, **flags)
    settle_collector()
    worker_flags = (
        *(("--model", model) if model else ()),
        *(("--config", config) if config else ()),
    )
    return run_loop(_serve(settings, worker_flags))


async def _serve(settings: Settings, worker_flags: Sequence[str]) -> int:
    shutdown = Shutdown()
    with shutdown.on_signals():
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
            await asyncio.wait({worker})


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

    async def run(self) -> str:
        """Run the worker; return the reason why it cannot run."""
        gateway_url = self._local_address
        name = worker_id(socket.gethostname())
        command = (
            *(sys.executable, "-m", "workers", "--leash", "--port", "0"),
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
                environment={"PACELINE_JOIN_TOKEN": self._join_token, "PYTHONUNBUFFERED": "1"},
                on_ready=functools.partial(self._greet, client),
                on_exit=functools.partial(_remove_worker, client, name),
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

    async def _greet(self, client: httpx.AsyncClient, ready: Mapping[str, Any]) -> None:
        """Print the ready message once the worker has joined, so that the snippet works."""
        await _wait_until_joined(client, ready["worker_id"], ready["url"])
        if self.greeted:
            _print("The worker is ready again.")
        else:
            self.greeted = True
            _print(f"\n{self._ready_message(ready['model'])}\n")

    def _ready_message(self, model: str) -> str:
        """Return the address, a snippet that uses it, and the command that joins a Mac."""
        host, keyed = self.given.host, self.listening.keyed
        local_only = is_loopback(host)
        local_address = self._local_address
        other_host = local_only or local_address != base_url(host, self._port)
        network_address = base_url(_network_host() if other_host else host, self._port)
        snippet = _SNIPPET.format(
            address=local_address,
            api_key='os.environ["PACELINE_API_KEY"]' if keyed else '"none"',
            model=model,
            question=_QUESTION,
        )
        shown = local_address if local_only else network_address
        token, token_hint = self._join_token, ""
        if not sys.stdout.isatty():  # the readers of a pipe or a log may not join workers
            source = secret_source(self.given, "join_token")
            token, token_hint = "TOKEN", f"\nThe join token: {source}"
        # The shell may not find `paceline`.
        command = "paceline" if shutil.which("paceline") else os.path.relpath(sys.argv[0])
        return "\n\n".join(
            (
                f"Paceline is ready on {shown} (model {model}).\nDashboard: {shown}/dashboard\n"
                f"Admin page: {serve.admin_page(self.given, self.listening)}",
                ("import os\n" if keyed else "") + snippet,
                *((_OPEN_FIRST.format(command=command),) if local_only else ()),
                _JOIN.format(command=command, address=network_address, token=token) + token_hint,
            )
        )


async def _remove_worker(client: httpx.AsyncClient, name: str) -> None:
    """Remove a dead worker at once, so that its next process can join under the same id."""
    with contextlib.suppress(httpx.HTTPError):
        await client.delete(f"/{name}", params={"restarting": "true"})


async def _wait_until_joined(client: httpx.AsyncClient, name: str, worker_url: str) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):  # the gateway may be shutting down
            response = await client.get(f"/{name}/joined")
            if response.is_success and response.json()["url"] == worker_url:
                return
        await asyncio.sleep(_JOIN_POLL_S)


def _network_host() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only picks the interface.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def worker_id(hostname: str) -> str:
    """Return the worker id for a host name."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-")[:60] or "local"
