"""Virtual environments of the peers, each with pinned versions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_INSTALLED = """
import sys
from importlib.metadata import version
pins = (pin.split("==") for pin in sys.argv[1:])
sys.exit(any(version(name.partition("[")[0]) != pinned for name, pinned in pins))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Venv:
    """Packages of one environment; `pins` are NAME==VERSION, dependencies follow from them."""

    name: str
    pins: tuple[str, ...]


class PeerUnavailable(Exception):
    """An engine cannot be installed or started; the message contains the reason."""


def python_of(venv: Venv, folder: Path) -> Path:
    """Return the interpreter of an environment under `folder`; create it if it is not as pinned."""
    home = folder / venv.name
    python = home / "bin" / "python"
    if python.exists() and _runs([str(python), "-c", _INSTALLED, *venv.pins]):
        return python
    log = folder / f"{venv.name}.install.log"
    folder.mkdir(parents=True, exist_ok=True)
    if not (
        _runs([sys.executable, "-m", "venv", "--clear", str(home)], log)
        and _runs([str(python), "-m", "pip", "install", *venv.pins], log)
    ):
        raise PeerUnavailable(f"not installable: {last_line(log)}")
    return python


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "no output")[:300]


def _runs(command: list[str], log: Path | None = None) -> bool:
    if log is None:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    with log.open("ab") as output:
        return subprocess.run(command, stdout=output, stderr=output, check=False).returncode == 0
