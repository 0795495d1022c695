"""`paceline gateway`: the front door alone; its workers are joined or listed by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from pydantic import SecretStr

from gateway.config.settings import Settings, load_settings
from gateway.server import run as run_loop
from gateway.server import serve, settle_collector
from workers.lifecycle import Shutdown

_UNKEYED = (
    "There is no key yet: only this machine is served, and without one. "
    "`paceline keys create NAME` makes the first."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `gateway` and `up` share."""
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (8000)")
    parser.add_argument("--config", type=Path, help="configuration file (paceline.yaml)")
    parser.add_argument("--token", help="secret that workers join with (made and kept if not set)")


def settings_from(options: argparse.Namespace) -> Settings:
    """Read the settings; raise `StartRefused` if they cannot be used."""
    token = SecretStr(options.token) if options.token else None
    return load_settings(options.config, host=options.host, port=options.port, join_token=token)


def run(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, then let running answers finish."""
    settings = settings_from(options)
    settle_collector()
    run_loop(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    shutdown = Shutdown()
    with shutdown.on_signals():
        await serve(
            settings,
            shutdown=shutdown,
            started=lambda address: print(f"Paceline listens on {address}", flush=True),  # noqa: T201
            unkeyed=lambda: print(_UNKEYED, flush=True),  # noqa: T201
            admin_started=lambda address: print(f"Admins are served on {address}", flush=True),  # noqa: T201
        )
