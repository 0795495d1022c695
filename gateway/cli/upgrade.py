"""`paceline upgrade`: install another version in place of this one, and restart the service.

Once the files are replaced, only commands of the new version run: this process imports no more.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import click

from gateway.cli import CommandError, service
from paceline.installation import clone, describe_version, missing_worker

WATCH_S = 10.0
"""A service that cannot start has ended by then."""
_POLL_S = 0.5
_HOW = "Upgrade Paceline as you have installed it, then run `paceline service restart`."


def run(dist: Path | None) -> int:
    """Let running requests end, install, start again, and watch whether the service stays."""
    install, old = _install_command(dist)
    before, keeper = describe_version(), service.find()
    if keeper is not None:
        click.echo("The service stops, once its running requests have ended.")
        keeper.stop()
    failed = _call(*install, quiet=False)
    paceline = shutil.which("paceline") or str(Path(sys.prefix, "bin/paceline"))
    if keeper is not None:
        failed = failed or _call(paceline, "service", "restart")
        deadline_s = time.monotonic() + WATCH_S
        while not failed and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            failed = _call(paceline, "service", "status")
    back = f"`sh {old}/install.sh`" if old else f"installing {before} again"
    if failed:
        if keeper is not None:
            _call(paceline, "service", "restart")
        raise CommandError(f"The upgrade from {before} has failed; {back} restores it.")
    _call(paceline, "--version", quiet=False)
    click.echo(f"The previous version was {before}; {back} restores it.")
    return 0


def _install_command(dist: Path | None) -> tuple[list[str], Path | None]:
    """Return the installer of the other version, and the folder of this one."""
    prefix = Path(sys.prefix)
    if clone() is not None:
        raise CommandError("This is a clone: run `git pull`, then `scripts/setup worker`.")
    if "Cellar" in prefix.parts:
        return ["brew", "upgrade", "paceline"], None
    receipt = prefix / "uv-receipt.toml"
    if not receipt.exists():
        raise CommandError(_HOW)
    requirements = tomllib.loads(receipt.read_text())["tool"]["requirements"]
    wheels = [Path(one["path"]) for one in requirements if "path" in one]
    old = next((wheel.parent for wheel in wheels if (wheel.parent / "install.sh").exists()), None)
    folder = dist or old
    if folder is None or not (folder / "install.sh").is_file():
        raise CommandError("Name the folder of the other version, which has its `install.sh`.")
    options = ["--gateway"] if missing_worker() else []
    return ["sh", str(folder / "install.sh"), *options], old


def _call(*command: str, quiet: bool = True) -> int:
    """Return the exit code of a command; not 0 either if it is missing or interrupted."""
    output = subprocess.DEVNULL if quiet else None
    try:
        return subprocess.run(command, stdout=output, check=False).returncode  # noqa: S603
    except (OSError, KeyboardInterrupt):  # the service must not stay stopped
        return 1
