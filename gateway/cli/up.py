"""Run the gateway in this process and one worker as its child: an endpoint in one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr
from rich.console import Console
from rich.text import Text

from gateway.cli import gateway as serve
from gateway.cli.supervisor import GiveUp, Supervisor
from gateway.config.settings import Settings
from gateway.config.startup_checks import ensure_join_token
from gateway.server import run as run_loop
from gateway.server import serve as serve_gateway
from gateway.server import settle_collector
from workers.lifecycle import Shutdown
from workers.protocol import is_loopback

_REQUEST_TIMEOUT_S = 2.0
_JOIN_POLL_S = 0.05
_WORKERS_PATH = "/admin/v1/workers"
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

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running gateway and its worker, as the ready message describes them."""

    address: str
    host: str
    """The setting of the gateway."""
    model: str
    join_token: str
    keyed: bool
    """Whether clients need an API key."""
    command: str
    """The command line that runs `paceline` here."""


def ready_message(started: Started) -> str:
    """Return where the gateway runs, a snippet that uses it, and the command that joins a Mac."""
    local_only = is_loopback(started.host)
    local_address = on_this_machine(started.address)
    network_address = (
        _with_host(_network_host(), started.address) if local_only else _reachable(started.address)
    )
    snippet = _SNIPPET.format(
        address=local_address,
        api_key='os.environ["PACELINE_API_KEY"]' if started.keyed else '"none"',
        model=started.model,
        question=_QUESTION,
    )
    shown = local_address if local_only else network_address
    return "\n\n".join(
        (
            f"Paceline is ready on {shown} (model {started.model}).\nDashboard: {shown}/dashboard",
            ("import os\n" if started.keyed else "") + snippet,
            *((_OPEN_FIRST.format(command=started.command),) if local_only else ()),
            _JOIN.format(
                command=started.command, address=network_address, token=started.join_token
            ),
        )
    )


def on_this_machine(address: str) -> str:
    """Return the address that reaches the gateway from this machine: no wildcard."""
    loopback = _LOOPBACK_OF.get(urlsplit(address).hostname or "")
    return _with_host(loopback, address) if loopback else address


def _reachable(address: str) -> str:
    wildcard = urlsplit(address).hostname in _LOOPBACK_OF
    return _with_host(_network_host(), address) if wildcard else address


def _with_host(host: str, address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{host}:{parts.port}"


def _network_host() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only picks the interface.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `up`."""
    serve.add_options(parser)
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--model", help="folder or Hugging Face name of an MLX model (default: a toy model)"
    )


def _run(options: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; return 1 if the worker cannot run."""
    settings = ensure_join_token(serve.settings_from(options))
    settle_collector()
    return run_loop(_serve(settings, options))


async def _serve(settings: Settings, options: argparse.Namespace) -> int:
    shutdown = Shutdown()
    with shutdown.on_signals():
        terminal = _Terminal()
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        unkeyed = asyncio.Event()
        gateway = asyncio.create_task(
            serve_gateway(
                settings,
                shutdown=shutdown,
                started=address.set_result,
                admin_started=lambda address: terminal.print_line(
                    f"The admin port listens on {address}."
                ),
                unkeyed=unkeyed.set,
            ),
            name="gateway",
        )
        first: set[asyncio.Future[Any]] = {gateway, address}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            await gateway  # raises the error that prevented the start
            return 0
        terminal.print_line(f"Gateway listens on {address.result()}.")
        worker_runner = _WorkerRunner(
            settings=settings,
            options=options,
            address=address.result(),
            keyed=not unkeyed.is_set(),
            terminal=terminal,
        )
        return await _run_worker_beside(gateway, worker_runner, shutdown)


async def _run_worker_beside(
    gateway: asyncio.Task[None], worker_runner: _WorkerRunner, shutdown: Shutdown
) -> int:
    """Run the worker as long as the gateway; streams end before the worker."""
    worker = asyncio.create_task(worker_runner.run(), name="worker")
    try:
        await asyncio.wait({gateway, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker_runner.terminal.print_line(f"Paceline ends: {worker.result().reason}.")
            shutdown.request()
        await gateway
        return 1 if worker.done() else 0
    finally:
        # From here on the worker only logs that the gateway is gone.
        worker_runner.terminal.worker_muted = True
        worker.cancel()
        await asyncio.wait({worker})


class _Terminal:
    """Prints lines of `up` unchanged and lines of the worker with a prefix."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.worker_muted = False

    def print_line(self, text: str) -> None:
        self._console.print(Text(text))

    def print_worker_line(self, line: str) -> None:
        if not self.worker_muted:
            self._console.print(Text("worker | ", style="dim").append(line))


@dataclass(slots=True, kw_only=True)
class _WorkerRunner:
    """Starts the worker of this `up`, and prints the ready message once."""

    settings: Settings
    options: argparse.Namespace
    address: str
    keyed: bool
    """Whether clients need an API key."""
    terminal: _Terminal
    greeted: bool = False

    async def run(self) -> GiveUp:
        token = _secret_value(self.settings.join_token)
        async with httpx.AsyncClient(
            base_url=on_this_machine(self.address),
            headers={"authorization": f"Bearer {token}"},
            timeout=_REQUEST_TIMEOUT_S,
            trust_env=False,
        ) as gateway:
            return await Supervisor(
                command=self._command(),
                # `ps` shows arguments to everybody, so the environment carries the token.
                environment={"PACELINE_JOIN_TOKEN": token, "PYTHONUNBUFFERED": "1"},
                on_ready=functools.partial(self._greet, gateway),
                on_exit=functools.partial(self._remove_worker, gateway),
                print_line=self.terminal.print_line,
                print_worker_line=self.terminal.print_worker_line,
            ).run()

    def _command(self) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "workers", "--leash", "--port", "0"),
            *("--id", worker_id(socket.gethostname())),
            *("--join", on_this_machine(self.address)),
            *(("--model", self.options.model) if self.options.model else ()),
            *(("--config", str(self.options.config)) if self.options.config else ()),
        )

    async def _greet(self, gateway: httpx.AsyncClient, ready: Mapping[str, Any]) -> None:
        """Print the ready message once the gateway knows the worker, so that the snippet works."""
        await _wait_until_joined(gateway, ready["worker_id"], ready["url"])
        if self.greeted:
            self.terminal.print_line("The worker is ready again.")
            return
        self.greeted = True
        started = Started(
            address=self.address,
            host=self.settings.host,
            model=ready["model"],
            join_token=_secret_value(self.settings.join_token),
            keyed=self.keyed,
            command=_own_command(),
        )
        self.terminal.print_line("\n" + ready_message(started) + "\n")

    async def _remove_worker(self, gateway: httpx.AsyncClient) -> None:
        """Remove a dead worker at once, so that its next process can join under the same id."""
        with contextlib.suppress(httpx.HTTPError):
            await gateway.delete(f"{_WORKERS_PATH}/{worker_id(socket.gethostname())}")


async def _wait_until_joined(gateway: httpx.AsyncClient, name: str, worker_url: str) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):  # the gateway may be shutting down
            response = await gateway.get(f"{_WORKERS_PATH}/{name}/joined")
            if response.is_success and response.json()["url"] == worker_url:
                return
        await asyncio.sleep(_JOIN_POLL_S)


def worker_id(hostname: str) -> str:
    """Return the worker id for a host name."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-")[:60] or "local"


def _secret_value(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret else ""


def _own_command() -> str:
    """Return `paceline` if the shell finds it, else the path of this command."""
    return "paceline" if shutil.which("paceline") else os.path.relpath(sys.argv[0])
