"""The installed package: its version, the commit that it was built from, and its extras."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

COMMIT_FILE = "extra_metadata/commit"
"""In the metadata of a wheel, which `hatch_build.py` writes."""
_ROOT = Path(__file__).parents[1]
_MODULES = {
    "worker": ("llguidance", "mlx", "mlx_lm", "mlx_vlm", "PIL", "regex"),
    "otel": ("opentelemetry", "opentelemetry.sdk"),
}
"""Modules that an extra brings; a parent comes before its child."""
_IN_CLONE = {
    "worker": "scripts/setup worker",
    "otel": ".venv/bin/pip install --require-hashes --requirement locks/dev.txt --no-deps",
}
_GIT = "git --git-dir=.git --work-tree=. describe --always --dirty --exclude=* --abbrev=12"
_GIT_TIMEOUT_S = 10.0


def clone() -> Path | None:
    """Return the clone that this package runs from; None where a wheel was installed."""
    return _ROOT if (_ROOT / "scripts" / "setup").exists() else None


def describe_version() -> str:
    """Return the version, and in brackets the commit of the wheel or of this clone."""
    paceline = distribution("paceline")
    commit = paceline.read_text(COMMIT_FILE) or commit_of(_ROOT)
    return f"{paceline.version} ({commit})" if commit else paceline.version


def commit_of(clone: Path) -> str:
    """Return the commit of a clone, with `-dirty` if its files differ; elsewhere nothing."""
    if not (clone / ".git").exists():
        return ""
    try:
        return subprocess.run(  # noqa: S603  # our own words
            _GIT.split(),
            cwd=clone,
            capture_output=True,
            check=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a clone that it does not trust
        return ""


def missing_worker() -> str:
    """Return how to install the packages of a worker; empty if they are installed."""
    if _is_installed("worker"):
        return ""
    return f"The packages of a worker are not installed. Run `{install_command('worker')}`."


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, from the same source."""
    if clone() is not None:
        return _IN_CLONE[extra]
    extras = ",".join(name for name in sorted(_MODULES) if name == extra or _is_installed(name))
    paceline = distribution("paceline")
    origin = json.loads(paceline.read_text("direct_url.json") or "{}").get("url")
    pinned = f" @ {origin}" if origin else f"=={paceline.version}"
    return f"uv tool install 'paceline[{extras}]{pinned}'"


def _is_installed(extra: str) -> bool:
    return all(find_spec(module) is not None for module in _MODULES[extra])
