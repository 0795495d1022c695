"""`paceline worker`: its command line, its start, and the lines that it prints."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import uvloop

from workers.command_line import describe_usage_error, worker_command
from workers.config_file import InvalidSettings, load_layered
from workers.engine.spec_prefill import SpecPrefillSettings
from workers.engine.types import EngineSettings, ModelCard, ModelUnusable
from workers.heartbeat import NotAdmitted, wait_for_gateway
from workers.lifecycle import Shutdown
from workers.protocol import READY_PREFIX, ExitCode
from workers.server.model_source import ModelSource, resolve_model
from workers.server.pictures import PictureMemory
from workers.server.ports import ServingEngine
from workers.server.runtime import Worker
from workers.server.server import cannot_listen, serve, watch_leash
from workers.server.settings import (
    WorkerSettings,
    advertised_url,
    default_worker_id,
    prefix_cache_secret,
)
from workers.terminal import configure_logging, printable

_EXIT_CODES: dict[type[Exception], ExitCode] = {
    InvalidSettings: ExitCode.SETTINGS,
    ModelUnusable: ExitCode.MODEL,
    NotAdmitted: ExitCode.NOT_ADMITTED,
}


def main(arguments: Sequence[str]) -> int:
    """Run a worker until its end; return the exit code."""
    configure_logging(logging.INFO, "%(asctime)s %(levelname)s %(message)s")
    for verbose in ("httpx", "uvicorn"):
        logging.getLogger(verbose).setLevel(logging.WARNING)
    try:
        return _run(read_settings(arguments))
    except click.exceptions.Exit as end:  # after `--help`
        return end.exit_code
    except click.UsageError as error:
        sys.stderr.write(printable(f"paceline worker: {describe_usage_error(error)}\n"))
        return ExitCode.SETTINGS
    except (InvalidSettings, ModelUnusable, NotAdmitted) as error:
        sys.stderr.write(printable(f"paceline worker: {error}\n"))
        return _EXIT_CODES[type(error)]
    except KeyboardInterrupt:  # while the weights load; later the server handles signals
        return ExitCode.INTERRUPTED


def _run(settings: WorkerSettings) -> int:
    # Bind before the weights load, which may take minutes: a port in use is reported at once.
    with _bind(settings.listening_host, settings.port) as listener:
        cache_secret = prefix_cache_secret(settings)
        if settings.join:
            wait_for_gateway(
                settings.join, settings.token, _worker_id(settings, listener), _pause_of(settings)
            )
        source = resolve_model(settings.model)
        engine = _start_engine(settings, source, cache_secret)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                alive = runner.run(_serve(settings, source, engine, listener))
        finally:
            engine.stop()
    return ExitCode.ENDED if alive else ExitCode.ENGINE_DIED


def _worker_id(settings: WorkerSettings, listener: socket.socket) -> str:
    return settings.id or default_worker_id(socket.gethostname(), listener.getsockname()[1])


def _pause_of(settings: WorkerSettings) -> Callable[[float], object]:
    """Return `time.sleep`, or for a worker on a leash a wait that ends with its parent."""
    if not settings.leash:
        return time.sleep

    def pause(seconds: float) -> None:
        if select.select([sys.stdin], [], [], seconds)[0] and not os.read(sys.stdin.fileno(), 1024):
            raise KeyboardInterrupt

    return pause


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return listener


def _start_engine(
    settings: WorkerSettings, source: ModelSource, cache_secret: bytes
) -> ServingEngine:
    spec_prefill = None
    if settings.spec_prefill:
        spec_prefill = SpecPrefillSettings(
            draft=resolve_model(settings.spec_prefill).folder,
            threshold_tokens=settings.spec_prefill_threshold,
            keep_share=settings.spec_prefill_keep,
        )
    # Imported late: MLX takes seconds to import, and wrong settings are reported before.
    from workers.engine.engine import Engine  # noqa: PLC0415

    return Engine.start(
        EngineSettings(
            model=source.folder,
            served_name=source.served_name,
            lanes=settings.lanes,
            draft_tokens=settings.draft_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            prefix_cache_dir=settings.prefix_cache_dir,
            prefix_cache_secret=cache_secret,
            spec_prefill=spec_prefill,
        )
    )


async def _serve(
    settings: WorkerSettings, source: ModelSource, engine: ServingEngine, listener: socket.socket
) -> bool:
    host, port = listener.getsockname()[:2]
    worker = Worker(
        worker_id=_worker_id(settings, listener),
        boot_id=secrets.token_hex(8),
        url=advertised_url(host, port, settings.join or None),
        labels=settings.labels,
        engine=engine,
        clock=time.time,
        started_s=time.time(),
        pictures=PictureMemory.within(engine.memory_limit_bytes()),
    )
    shutdown = Shutdown()
    leash = asyncio.create_task(watch_leash(shutdown)) if settings.leash else None
    try:
        with shutdown.on_signals():
            return await serve(
                worker,
                listener,
                token=settings.token,
                gateway_url=settings.join,
                follows_route=settings.follows_route,
                shutdown=shutdown,
                on_ready=lambda: _announce(worker, source, settings.join),
            )
    finally:
        if leash is not None:
            leash.cancel()


def _announce(worker: Worker, source: ModelSource, gateway_url: str) -> None:
    """Print the start lines for people, then the ready line for programs."""
    card = worker.engine.card
    if source.toy:
        _print(
            "This is a toy model that ships with Paceline. To serve a real one, start the worker "
            "with --model FOLDER_OR_REPOSITORY, for example --model Qwen/Qwen3.5-4B"
        )
    if not gateway_url:
        _print(
            "Not joined to any gateway: this worker answers at its own address alone. To join one, "
            "start it with --join http://GATEWAY:8000 --token TOKEN"
        )
    _print(_start_line(worker, card))
    ready = {
        "url": worker.url,
        "worker_id": worker.worker_id,
        "model": card.model,
        "lanes": list(card.lanes),
    }
    _print(READY_PREFIX + json.dumps(ready))


def _start_line(worker: Worker, card: ModelCard) -> str:
    """Return one line with the model, lanes, memory, requested and effective draft tokens."""
    lanes = " and ".join(card.lanes)
    shared = "share one copy of the weights" if len(card.lanes) > 1 else "is the only lane"
    reason = f" ({card.mtp_unavailable_reason.rstrip('.')})" if card.mtp_unavailable_reason else ""
    sparse = f"; {card.spec_prefill}" if card.spec_prefill else ""
    return (
        f"Worker {worker.worker_id} serves {card.model} at {worker.url}: {lanes} {shared}, "
        f"{card.weights_bytes / 1e6:.1f} MB of weights, "
        f"{worker.engine.memory_bytes() / 1e6:.1f} MB in use; "
        f"draft tokens: {card.draft_tokens_requested} requested, "
        f"{card.draft_tokens_effective} effective{reason}{sparse}."
    )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Return the settings of a command line; raise `InvalidSettings` naming each wrong one."""
    command = worker_command()
    with command.make_context("paceline worker", list(arguments)) as context:
        flags = {name: value for name, value in context.params.items() if value}
    config = flags.pop("config", None)
    return load_layered(
        WorkerSettings,
        flags,
        Path(config) if config else None,
        section="worker",
        flag_names={"labels": "label"},
    )
