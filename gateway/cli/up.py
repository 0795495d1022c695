"""`paceline up`: the gateway here, one worker as its child, and what to paste next.

What `paceline up` prints once requests are answered: plain text, ready to be pasted.
"""

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

_SNIPPET = """\
from openai import OpenAI

client = OpenAI(base_url="{address}/v1", api_key={api_key})
answer = client.chat.completions.create(
    model="{model}",
    temperature=0,  # greedy text takes the speculative lane
    messages=[{{"role": "user", "content": "{question}"}}],
)
print(answer.choices[0].message.content)"""

# Answered by the demo model as it was trained to; any real model knows the answer too.
_QUESTION = "Count from 1 to 20."
_JOIN = """\
Another Mac joins with
    {command} worker --join {address} --token {token} --model NAME"""
_OPEN_FIRST = """\
Only this machine reaches the gateway now. To let other Macs in, make a key for your clients, then
start it anew with
    {command} keys create NAME
    {command} up --host 0.0.0.0"""

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A running gateway and its own worker, as the person who started them sees it."""

    address: str
    host: str
    """What the gateway was told to listen on."""
    model: str
    join_token: str
    keyed: bool
    """Clients must bring a key."""
    command: str
    """How this command is typed here."""


def welcome(started: Started) -> str:
    """Say where the gateway runs, how to use it, and how another Mac joins it."""
    alone = is_loopback(started.host)
    from_here = on_this_machine(started.address)
    from_elsewhere = (
        _at(_network_address(), started.address) if alone else _reachable(started.address)
    )
    snippet = _SNIPPET.format(
        address=from_here,
        api_key='os.environ["PACELINE_API_KEY"]' if started.keyed else '"none"',
        model=started.model,
        question=_QUESTION,
    )
    shown = from_here if alone else from_elsewhere
    return "\n\n".join(
        (
            f"Paceline is ready on {shown} (model {started.model}).\n"
            f"See what it does on {shown}/dashboard.",
            ("import os\n" if started.keyed else "") + snippet,
            *((_OPEN_FIRST.format(command=started.command),) if alone else ()),
            _JOIN.format(command=started.command, address=from_elsewhere, token=started.join_token),
        )
    )


def on_this_machine(address: str) -> str:
    """Return the address as this machine itself reaches it: a wildcard is no destination."""
    loopback = _LOOPBACK_OF.get(urlsplit(address).hostname or "")
    return _at(loopback, address) if loopback else address


def _reachable(address: str) -> str:
    wildcard = urlsplit(address).hostname in _LOOPBACK_OF
    return _at(_network_address(), address) if wildcard else address


def _at(host: str, address: str) -> str:
    parts = urlsplit(address)
    return f"{parts.scheme}://{host}:{parts.port}"


def _network_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only picks the interface.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


_ASK_TIMEOUT_S = 2.0
_JOIN_POLL_S = 0.05
_WORKERS_PATH = "/admin/v1/workers"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `up`."""
    serve.add_options(parser)
    parser.add_argument(
        "--model", help="folder or Hugging Face name of an MLX model (default: a toy model)"
    )


def run(options: argparse.Namespace) -> int:
    """Run until Ctrl-C or SIGTERM; return 1 if the worker cannot be made to run."""
    settings = ensure_join_token(serve.settings_from(options))
    settle_collector()
    return run_loop(_run(settings, options))


async def _run(settings: Settings, options: argparse.Namespace) -> int:
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
                admin_started=lambda address: terminal.say(f"Admins are served on {address}."),
                unkeyed=unkeyed.set,
            ),
            name="gateway",
        )
        first: set[asyncio.Future[Any]] = {gateway, address}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            await gateway  # raises what kept it from starting
            return 0
        terminal.say(f"Gateway listens on {address.result()}.")
        own_worker = _OwnWorker(
            settings=settings,
            options=options,
            address=address.result(),
            keyed=not unkeyed.is_set(),
            terminal=terminal,
        )
        return await _beside(gateway, own_worker, shutdown)


async def _beside(gateway: asyncio.Task[None], own_worker: _OwnWorker, shutdown: Shutdown) -> int:
    """Keep the worker running for as long as the gateway runs; streams end before the worker."""
    worker = asyncio.create_task(own_worker.run(), name="worker")
    try:
        await asyncio.wait({gateway, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            own_worker.terminal.say(f"Ending: {worker.result().reason}.")
            shutdown.request()
        await gateway
        return 1 if worker.done() else 0
    finally:
        # From here on it only complains that the gateway is gone.
        own_worker.terminal.worker_muted = True
        worker.cancel()
        await asyncio.wait({worker})


class _Terminal:
    """The one place that prints: our lines plainly, the worker's with a mark."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self.worker_muted = False

    def say(self, text: str) -> None:
        self._console.print(Text(text))

    def show_worker_line(self, line: str) -> None:
        if not self.worker_muted:
            self._console.print(Text("worker | ", style="dim").append(line))


@dataclass(slots=True, kw_only=True)
class _OwnWorker:
    """The worker of this `up`: how it is started, and what is said when it is ready."""

    settings: Settings
    options: argparse.Namespace
    address: str
    keyed: bool
    """Clients need a key."""
    terminal: _Terminal
    welcomed: bool = False

    async def run(self) -> GiveUp:
        token = _revealed(self.settings.join_token)
        async with httpx.AsyncClient(
            base_url=on_this_machine(self.address),
            headers={"authorization": f"Bearer {token}"},
            timeout=_ASK_TIMEOUT_S,
            trust_env=False,
        ) as gateway:
            return await Supervisor(
                command=self._command(),
                # The token travels by environment: arguments are shown to everybody by `ps`.
                environment={"PACELINE_JOIN_TOKEN": token, "PYTHONUNBUFFERED": "1"},
                on_ready=functools.partial(self._welcome, gateway),
                on_death=functools.partial(self._sign_off, gateway),
                say=self.terminal.say,
                show_line=self.terminal.show_worker_line,
            ).run()

    def _command(self) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "workers", "--leash", "--port", "0"),
            *("--id", worker_id(socket.gethostname())),
            *("--join", on_this_machine(self.address)),
            *(("--model", self.options.model) if self.options.model else ()),
            *(("--config", str(self.options.config)) if self.options.config else ()),
        )

    async def _welcome(self, gateway: httpx.AsyncClient, ready: Mapping[str, Any]) -> None:
        """Say what to do next, once the gateway knows the worker: what is pasted then works."""
        await _wait_until_joined(gateway, ready["worker_id"], ready["url"])
        if self.welcomed:
            self.terminal.say("The worker is ready again.")
            return
        self.welcomed = True
        started = Started(
            address=self.address,
            host=self.settings.host,
            model=ready["model"],
            join_token=_revealed(self.settings.join_token),
            keyed=self.keyed,
            command=_own_command(),
        )
        self.terminal.say("\n" + welcome(started) + "\n")

    async def _sign_off(self, gateway: httpx.AsyncClient) -> None:
        """Take a dead worker off the list at once, and so let the next life have its name."""
        with contextlib.suppress(httpx.HTTPError):
            await gateway.delete(f"{_WORKERS_PATH}/{worker_id(socket.gethostname())}")


async def _wait_until_joined(gateway: httpx.AsyncClient, name: str, worker_url: str) -> None:
    while True:
        with contextlib.suppress(httpx.HTTPError):  # it may be ending; so are we then
            answer = await gateway.get(f"{_WORKERS_PATH}/{name}/joined")
            if answer.is_success and answer.json()["url"] == worker_url:
                return
        await asyncio.sleep(_JOIN_POLL_S)


def worker_id(hostname: str) -> str:
    """Name the worker after its machine, whatever port it gets."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", hostname.partition(".")[0]).strip("-")[:60] or "local"


def _revealed(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret else ""


def _own_command() -> str:
    """Spell the command as it can be typed here: by name if the shell finds it."""
    return "paceline" if shutil.which("paceline") else os.path.relpath(sys.argv[0])
