"""`paceline service`: one service on this machine, which runs `up`, `gateway` or `worker`."""

from __future__ import annotations

import math
import os
import platform
import sys
from pathlib import Path
from typing import TypeAlias

import click

from gateway.cli import CommandError
from gateway.cli.service.launchd import Launchd
from gateway.cli.service.system import LONGEST_STOP_S, sudo_account
from gateway.cli.service.systemd import Systemd

System: TypeAlias = Launchd | Systemd
# Others may read the definition of a service, so it contains no secret.
_PASSED = ("PATH", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "SSL_CERT_FILE")
_END_S = 30
"""For the end of the worker, and of the processes themselves."""


def log_file(home: Path) -> Path:
    """Return the file with the output of the service."""
    return home / ".paceline/logs/service.log"


def install(*, command: str, config: str | None, system: bool) -> int:
    """Install and start the service, in place of an older one."""
    keeper = _system(system=system, to_change=True)
    config = config or os.environ.get("PACELINE_CONFIG")
    # As the command itself finds it, else a file that no folder decides.
    here = Path("paceline.yaml")
    file = Path(config) if config else here if here.is_file() else keeper.home / ".paceline" / here
    file = file.absolute()
    if config and not file.is_file():
        raise CommandError(f"The settings file {file} does not exist.")
    missed = [name for name in os.environ if name.startswith("PACELINE_")]
    for name in missed:  # the check uses only what the service will get
        del os.environ[name]
    given = ("--config", str(file)) if file.is_file() else ()
    words = (sys.executable, "-P", "-m", __name__, str(file.parent), command, *given)
    environment = {name: os.environ[name] for name in _PASSED if os.environ.get(name)}
    if not all(map(str.isprintable, (*words, *environment.values()))):
        raise CommandError("The paths of a service cannot contain control characters.")
    stop_s = _check(command, file if given else None)
    try:
        warning = keeper.install(words, environment, stop_s)
    except OSError as error:
        raise CommandError(f"{keeper.definition}: {error.strerror}.") from None
    click.echo(f"The service runs `paceline {command}` with the settings of {file}.")
    if missed := sorted({*missed} - {"PACELINE_CONFIG"}):
        click.echo(f"It does not get {', '.join(missed)} from this shell; set them in that file.")
    if warning:
        click.echo(warning)
    return 0


def status() -> int:
    """Print whether the service runs; return 1 if it does not."""
    keeper = _installed()
    process, code = keeper.state()
    runs = f"runs (process {process})" if process else "does not run"
    click.echo(f"The service {runs}{f'; its last exit code was {code}' if code else ''}.")
    click.echo(f"Definition: {keeper.definition}\nLog: {log_file(keeper.home)}")
    return 0 if process else 1


def logs(*, lines: int, follow: bool) -> int:
    """Print the end of the log; become `tail`."""
    path = log_file(_installed().home)
    if not path.is_file():
        raise CommandError(f"The service has written no log yet ({path}).")
    os.execvp("tail", ["tail", "-n", str(lines), *(["-F"] if follow else []), str(path)])  # noqa: S606, S607


def stop() -> int:
    """Let running requests end, and stop the service until it is started again."""
    _installed(to_change=True).stop()
    click.echo("The service has stopped; `paceline service restart` starts it.")
    return 0


def restart() -> int:
    """Let running requests end, and start the service again."""
    _installed(to_change=True).restart()
    click.echo("The service restarts once its running requests have ended.")
    return 0


def uninstall() -> int:
    """Let running requests end, and remove the service."""
    _installed(to_change=True).uninstall()
    click.echo("The service is removed; its settings, keys and logs remain.")
    return 0


def _system(*, system: bool, to_change: bool = False) -> System:
    is_mac = platform.system() == "Darwin"
    if system and not is_mac:
        raise CommandError("--system is only for macOS; elsewhere a service needs no login.")
    if to_change and system != bool(sudo_account()):
        needed = "with sudo, from the account that runs it" if system else "without sudo"
        raise CommandError(f"This service can only be changed {needed}.")
    return Launchd(system=system) if is_mac else Systemd()


def find(*, to_change: bool = True) -> System | None:
    """Return the system that has the service, if one has."""
    for system in (False, True) if platform.system() == "Darwin" else (False,):
        if _system(system=system).definition.exists():
            return _system(system=system, to_change=to_change)
    return None


def _installed(*, to_change: bool = False) -> System:
    if (keeper := find(to_change=to_change)) is None:
        raise CommandError("No service is installed; `paceline service install` installs it.")
    return keeper


def _check(command: str, file: Path | None) -> int:
    """Return how long a shutdown may take; raise `StartupError` for wrong settings."""
    # Loads pydantic: not for the process of the service.
    from gateway.config.settings import load_settings  # noqa: PLC0415
    from gateway.errors import StartupError  # noqa: PLC0415
    from paceline.installation import missing_worker  # noqa: PLC0415

    if command != "gateway" and (lack := missing_worker()):
        raise StartupError(lack)
    settings = load_settings(file)
    drain_s = settings.lame_duck_s + settings.drain_timeout_s
    return math.ceil(min(drain_s, LONGEST_STOP_S - _END_S)) + _END_S
