"""The wheel, as `make wheel` builds it."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from paceline.protocol import PROTOCOL
from tests.support.worker_process import environment_without_paceline

ROOT = Path(__file__).parents[2]
VERSION = version("paceline")
NEWER_VERSION = "9.0.0"
WHEEL = f"paceline-{VERSION}-py3-none-any.whl"


def run_wheel(
    folder: Path, repository: str = "", *, clone: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts/wheel", *([repository] if repository else [])],
        env={**os.environ, "OUT": str(folder), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


def build_wheel(folder: Path, repository: str = "", *, clone: Path = ROOT) -> Path:
    """Build the wheel and the files beside it; return the wheel."""
    ended = run_wheel(folder, repository, clone=clone)
    assert (ended.returncode, ended.stderr) == (0, "")
    (wheel,) = folder.glob("paceline-*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Install a wheel by uv into an environment, in place of an older one; return `paceline`.

    The environment holds the wheel only. It borrows the other packages from that of the tests: to
    install these takes longer, and needs an index.
    """
    search = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if (uv := shutil.which("uv", path=search)) is None:
        pytest.skip("uv is not installed")
    python = folder / "bin/python"
    for command in (
        ("venv", "--allow-existing", "--python", sys.executable, folder),
        ("pip", "install", "--offline", "--no-deps", "--reinstall", "--python", python, wheel),
    ):
        subprocess.run([uv, "--no-cache", *command], check=True, capture_output=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python.with_name("paceline")


def build_newer_wheel(folder: Path) -> Path:
    """Build the wheel of a newer release, which has the next protocol; return it."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    clone = folder / "clone"
    for name in filter(None, files.split("\0")):
        copy = clone / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    for name, old, new in (
        ("pyproject.toml", f'version = "{VERSION}"', f'version = "{NEWER_VERSION}"'),
        ("paceline/protocol.py", f"PROTOCOL = {PROTOCOL}\n", f"PROTOCOL = {PROTOCOL + 1}\n"),
    ):
        text = (clone / name).read_text()
        assert text.count(old) == 1, name
        (clone / name).write_text(text.replace(old, new))
    return build_wheel(folder / "dist", clone=clone)


def bare_environment() -> dict[str, str]:
    """Return the environment of a shell that knows neither the clone nor OpenBLAS."""
    given = environment_without_paceline()
    own = ("PYTHONPATH", "WITH_BLAS", "LD_PRELOAD", "VIRTUAL_ENV")
    return {name: value for name, value in given.items() if name not in own}
