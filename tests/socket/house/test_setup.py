"""scripts/setup reports a failure in one message and leaves no partial installation."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("sh", "cat", "cksum", "tr", "dirname", "uname", "ls", "id", "head", "find", "env")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone with the files that setup reads, and a PATH with few tools."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        executable = shutil.which(name)
        assert executable is not None
        (tools / name).symlink_to(executable)
    return tmp_path


def set_up(clone: Path, lock: str = "dev", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts" / "setup", lock],
        env={"PATH": str(clone / "bin"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_python_is_reported_in_one_message(clone: Path) -> None:
    result = set_up(clone)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("paceline: no Python 3.11 or newer found; install one")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a compiler")
def test_a_missing_compiler_is_reported_in_one_message(clone: Path) -> None:
    result = set_up(clone, PYTHON=sys.executable)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("paceline: g++ is missing")
    assert not (clone / ".venv").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs a compiler")
def test_setup_of_a_gateway_needs_no_compiler(clone: Path) -> None:
    """Setup proceeds to the virtual environment, whose creation fails with this Python."""
    python = clone / "bin" / "python3"
    python.write_text(f'#!/bin/sh\n[ "$2" != venv ] || exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (clone / "bin" / "rm").symlink_to(shutil.which("rm") or "")
    result = set_up(clone, "gateway")
    assert result.returncode == 1
    assert result.stderr == f"paceline: '{python} -m venv .venv' failed; see above.\n"
    assert set_up(clone, "worker").stderr.startswith("paceline: g++ is missing")


def test_setup_skips_the_installation_when_its_stamp_is_current(clone: Path) -> None:
    """The clone has no installation: setup succeeds because of the stamp only."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    for program in (clone / ".venv" / "bin" / "paceline", clone / "bin" / "redis-server"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    digest_command = "cat locks/dev.txt pyproject.toml scripts/setup | cksum | tr ' ' '-'"
    digest = subprocess.run(
        ["sh", "-c", digest_command], cwd=clone, capture_output=True, text=True, check=True
    ).stdout
    stamp = clone / ".venv" / ".ready-dev"
    stamp.write_text(digest)
    assert set_up(clone).returncode == 0
    (clone / "locks" / "dev.txt").write_text("changed\n")
    assert set_up(clone).returncode == 1


def test_the_installation_of_packages_shows_on_a_terminal_how_far_it_is(clone: Path) -> None:
    """pip prints nothing while it installs; this one waits until the terminal shows it."""
    for name in ("rm", "mkdir", "sleep", "grep", "sed", "cut", "tail", "wc"):
        (clone / "bin" / name).symlink_to(shutil.which(name) or "")
    venv = clone / ".venv"
    pip = (
        "#!/bin/sh\n"
        f'[ "$2" != venv ] || {{ mkdir -p {venv}/bin {venv}/lib/python3/site-packages; '
        f"cat {clone}/bin/python3 >{venv}/bin/python; chmod 755 {venv}/bin/python; exit 0; }}\n"
        f'[ "$2" != pip ] || {{ case "$*" in *editable*) exit 1 ;; esac\n'
        "    echo 'Installing collected packages: one, two, three'\n"
        f"    mkdir {venv}/lib/python3/site-packages/one-1.dist-info\n"
        f"    while [ ! -e {clone}/seen ]; do sleep 0.1; done; exit 0; }}\n"
        f'exec {sys.executable} "$@"\n'
    )
    (clone / "bin" / "chmod").symlink_to(shutil.which("chmod") or "")
    (clone / "bin" / "python3").write_text(pip)
    (clone / "bin" / "python3").chmod(0o755)
    terminal, end = os.openpty()
    with subprocess.Popen(
        [clone / "scripts" / "setup", "gateway"],
        env={"PATH": str(clone / "bin")},
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
    ) as setup:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal on Linux
            while part := os.read(terminal, 4096):
                shown += part
                if b": 1 of 3 installed" in shown:
                    (clone / "seen").touch()
    os.close(terminal)
    assert b": 1 of 3 installed" in shown
    assert setup.returncode == 1
    assert b"pip could not install the project" in shown
