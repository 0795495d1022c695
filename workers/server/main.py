"""`paceline worker`: from the command line to a running worker, and what it says meanwhile.

The command line of a worker; flags win over the environment, that over `paceline.yaml`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop
import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource

from workers.engine.spec_prefill import SpecPrefillSettings
from workers.engine.types import EngineSettings, ModelCard, ModelUnusable
from workers.protocol import READY_PREFIX, ExitCode
from workers.server.model_source import ModelSource, resolve_model
from workers.server.ports import ServingEngine
from workers.server.runtime import Identity, Worker
from workers.server.server import Ending, cannot_listen, serve, watch_leash
from workers.server.settings import (
    UnusableSettings,
    WorkerSettings,
    advertised_url,
    default_worker_id,
)

_DEFAULT_FILE = Path("paceline.yaml")
_SECTION = "worker"
_SPELLED = {"labels": "--label"}
"""Flags that are not called as their settings are."""


def read_settings(arguments: Sequence[str]) -> WorkerSettings:
    """Read flags, environment and file; raise `UnusableSettings` naming each wrong setting.

    The file is `--config`, else `PACELINE_CONFIG`, else `paceline.yaml` where it exists.
    """
    flags = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value}
    written = _read_section(flags.pop("config", None) or os.environ.get("PACELINE_CONFIG"))

    class Layered(WorkerSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, written)

    try:
        return Layered(**flags)
    except ValidationError as invalid:
        raise UnusableSettings(_sentence(invalid, flags, written)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline worker",
        description="Serve one MLX model on this machine, with a lane that speculates and one "
        "that sees pictures.",
        argument_default=None,
    )
    add = parser.add_argument
    add("--model", help="folder or Hugging Face name of an MLX model (default: a toy model)")
    add("--lanes", help="comma-separated lanes to run (default: text-mtp,vlm)")
    add("--host", help="address to listen on (default: loopback, or the one facing the gateway)")
    add("--port", help="port to listen on (default: 9200; 0 takes a free one)")
    add("--join", metavar="URL", help="gateway to report to")
    add("--token", help="join token of the gateway (better: PACELINE_JOIN_TOKEN)")
    add("--id", help="name of this worker (default: machine and port)")
    add("--label", action="append", dest="labels", help="what a policy may choose it by; repeat it")
    add("--draft-tokens", metavar="K", help="tokens drafted a step, 0 to 8 (default: 2)")
    add("--prefix-cache-dir", metavar="DIR", help="keep read system prompts across restarts")
    add("--prefix-cache-bytes", metavar="N", help="for read system prompts (default: 1 GiB)")
    add("--spec-prefill", metavar="DRAFT", help="small model that chooses what to read of prompts")
    add("--spec-prefill-threshold", metavar="N", help="shortest prompt it is for (default: 8192)")
    add("--spec-prefill-keep", metavar="SHARE", help="share that is read, up to 1 (default: 0.3)")
    add("--config", metavar="FILE", help="settings file, section 'worker' (default: paceline.yaml)")
    add("--leash", action="store_true", help="end when standard input closes")
    return parser


def _read_section(named: str | None) -> dict[str, Any]:
    file = Path(named) if named else _DEFAULT_FILE
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise UnusableSettings(f"The configuration file {file} does not exist.") from None
        return {}
    except (OSError, ValueError, yaml.YAMLError):
        raise UnusableSettings(f"The configuration file {file} cannot be read as YAML.") from None
    section = written.get(_SECTION) if isinstance(written, Mapping) else written
    if section is not None and not isinstance(section, Mapping):
        raise UnusableSettings(f"'{_SECTION}' in {file} must be a mapping.")
    return dict(section or {})


def _sentence(
    invalid: ValidationError, flags: Mapping[str, object], written: Mapping[str, object]
) -> str:
    """Name each wrong setting as the user wrote it; never its value, which may be a secret."""
    problems = []
    for error in invalid.errors(include_input=False, include_url=False):
        name = str(error["loc"][0]) if error["loc"] else ""
        text = error["msg"].removeprefix("Value error, ")
        if not name:
            problems.append(text)
            continue
        spelled = f"'{name}' in the section '{_SECTION}' of the configuration file"
        if name in flags:
            spelled = _SPELLED.get(name, f"--{name.replace('_', '-')}")
        elif name not in written:
            spelled = name if name.startswith("PACELINE_") else f"PACELINE_WORKER_{name.upper()}"
        problems.append(f"{spelled}: {text}")
    return "The settings are not usable: " + "; ".join(problems) + "."


def main(arguments: Sequence[str]) -> int:
    """Run a worker to its end; return the exit code."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    for chatty in ("httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # while the weights load; later the server listens to signals
        return ExitCode.INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    try:
        settings = read_settings(arguments)
        # Before the weights, which may take minutes: a taken port should be known at once.
        listener = _listen(settings.listening_host(), settings.port)
    except UnusableSettings as unusable:
        return _give_up(unusable, ExitCode.SETTINGS)
    with listener:
        try:
            source = resolve_model(settings.model)
            draft = resolve_model(settings.spec_prefill) if settings.spec_prefill else None
            engine = _start_engine(settings, source, draft)
        except ModelUnusable as unusable:
            return _give_up(unusable, ExitCode.MODEL)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                alive = runner.run(_live(settings, source, engine, listener))
        except UnusableSettings as unusable:
            return _give_up(unusable, ExitCode.SETTINGS)
        finally:
            engine.stop()
    return ExitCode.ENDED if alive else ExitCode.ENGINE_DIED


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    return listener


def _start_engine(
    settings: WorkerSettings, source: ModelSource, draft: ModelSource | None
) -> ServingEngine:
    # Imported late: wrong settings are answered in a moment, MLX takes seconds to import.
    from workers.engine.engine import Engine  # noqa: PLC0415

    return Engine.start(
        EngineSettings(
            model=source.folder,
            served_name=source.served_name,
            lanes=settings.lanes,
            draft_tokens=settings.draft_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            prefix_cache_dir=settings.prefix_cache_dir,
            spec_prefill=None
            if draft is None
            else SpecPrefillSettings(
                draft=draft.folder,
                threshold_tokens=settings.spec_prefill_threshold,
                keep_share=settings.spec_prefill_keep,
            ),
        )
    )


async def _live(
    settings: WorkerSettings, source: ModelSource, engine: ServingEngine, listener: socket.socket
) -> bool:
    host, port = listener.getsockname()[:2]
    worker = Worker(
        identity=Identity(
            worker_id=settings.id or default_worker_id(socket.gethostname(), port),
            boot_id=secrets.token_hex(8),
            url=advertised_url(host, port, settings.join or None),
            labels=settings.labels,
        ),
        engine=engine,
        clock=time.time,
        started_s=time.time(),
    )
    ending = Ending()
    leash = asyncio.create_task(watch_leash(ending)) if settings.leash else None
    try:
        return await serve(
            worker,
            listener,
            token=settings.token,
            gateway_url=settings.join,
            ending=ending,
            on_ready=lambda: _announce(worker, source),
        )
    finally:
        if leash is not None:
            leash.cancel()


def _announce(worker: Worker, source: ModelSource) -> None:
    """Write the start line for people, and the ready line for programs."""
    card, identity = worker.engine.card, worker.identity
    if source.toy:
        _say(
            "This is a toy model that comes with Paceline. Name a real one: "
            "--model FOLDER_OR_REPOSITORY, for example --model Qwen/Qwen3.5-4B"
        )
    _say(start_line(card, identity, worker.engine.memory_bytes()))
    ready = {
        "url": identity.url,
        "worker_id": identity.worker_id,
        "model": card.model,
        "lanes": list(card.lanes),
    }
    _say(READY_PREFIX + json.dumps(ready))


def start_line(card: ModelCard, identity: Identity, memory_bytes: int) -> str:
    """Say in one line what runs: model, lanes, memory, requested and effective draft tokens."""
    lanes = " and ".join(card.lanes)
    shared = "share one copy of the weights" if len(card.lanes) > 1 else "is the only lane"
    why = f" ({card.mtp_unavailable_reason.rstrip('.')})" if card.mtp_unavailable_reason else ""
    sparse = f"; {card.spec_prefill}" if card.spec_prefill else ""
    return (
        f"Worker {identity.worker_id} serves {card.model} on {identity.url}: {lanes} {shared}, "
        f"{card.weights_bytes / 1e6:.1f} MB of weights, {memory_bytes / 1e6:.1f} MB in use; "
        f"draft tokens requested {card.draft_tokens_requested}, "
        f"effective {card.draft_tokens_effective}{why}{sparse}."
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _give_up(error: Exception, exit_code: ExitCode) -> int:
    sys.stderr.write(f"paceline worker: {error}\n")
    return exit_code
