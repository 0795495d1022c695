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
TOOLS = (
    *("sh", "cat", "cksum", "tr", "dirname", "uname", "ls", "id", "head", "find", "env", "rm"),
    *("mkdir", "chmod", "cp", "grep", "sed", "cut", "tail", "wc"),
)
INSTALLED = ".venv/lib/python3/site-packages"
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin %(installed)s && cp bin/python3 .venv/bin/python ;;
*"locks/setup.txt"*) [ ! -e no-uv ] && cp uv .venv/bin/uv ;;
esac || { echo "no such package"; exit 1; }
case "$*" in
-c*) ;;
--version) echo Python 3.99 ;;
*editable*) echo "$@" >>calls && cp uv .venv/bin/paceline ;;
*) echo "$@" >>calls ;;
esac
"""
"""It makes a folder of a virtual environment, takes the place of pip, and notes its calls."""
UV = """#!/bin/sh
echo uv "$@" >>calls
case "$*" in
*editable*) cp "$0" .venv/bin/paceline ;;
*) [ ! -e uv-fails ] || { echo "the index is not reached"; exit 1; } ;;
esac
"""
LOCK = "--require-hashes --requirement locks/gateway.txt --no-deps"
PROJECT = "--no-deps --no-build-isolation --editable ."
PIP = "-m pip install --progress-bar off --disable-pip-version-check"
FETCH_UV = f"{PIP} --require-hashes --requirement locks/setup.txt --no-deps"
BY_UV = [f"uv pip install --python .venv/bin/python {what}" for what in (LOCK, PROJECT)]
BY_PIP = ["-m ensurepip", f"{PIP} {LOCK}", f"{PIP} {PROJECT}"]


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


def add_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


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
    add_program(clone / "bin/python3", '#!/bin/sh\n[ "$2" != venv ] || exit 1\n')
    result = set_up(clone, "gateway")
    assert result.returncode == 1
    python = clone / "bin/python3"
    assert result.stderr == f"paceline: '{python} -m venv .venv' failed; see above.\n"
    assert set_up(clone, "worker").stderr.startswith("paceline: g++ is missing")


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        ("uv-is-there", ["-m venv --without-pip .venv", *BY_UV]),
        ("uv-is-fetched", ["-m venv .venv", FETCH_UV, *BY_UV]),
        ("no-uv", ["-m venv .venv", *BY_PIP]),
        ("uv-fails", ["-m venv .venv", FETCH_UV, BY_UV[0], *BY_PIP]),
    ],
    ids=["uv is there", "uv is fetched", "no uv", "uv fails"],
)
def test_uv_installs_a_lock_and_pip_does_where_uv_cannot(
    clone: Path, case: str, calls: list[str]
) -> None:
    add_program(clone / "bin/python3", PYTHON % {"installed": INSTALLED})
    add_program(clone / "uv", UV)
    if case == "uv-is-there":
        (clone / "bin/uv").symlink_to(clone / "uv")
    (clone / case).touch()
    result = set_up(clone, "gateway")
    assert result.returncode == 0, result.stderr
    assert (clone / "calls").read_text().splitlines() == calls
    sentence = "uv could not install them; going on with pip, which takes a few minutes ...\n"
    assert (sentence in result.stdout) == ("-m ensurepip" in calls)
    why = {"no-uv": "no such package\n", "uv-fails": "the index is not reached\n"}
    assert result.stderr == why.get(case, "")
    (clone / "calls").unlink()
    assert set_up(clone, "gateway").returncode == 0
    assert not (clone / "calls").exists(), "the second call finds all in place"


def test_setup_skips_the_installation_when_its_stamp_is_current(clone: Path) -> None:
    """The clone has no installation: setup succeeds because of the stamp only."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    for program in (clone / ".venv" / "bin" / "paceline", clone / "bin" / "redis-server"):
        add_program(program, "#!/bin/sh\n")
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
    """Each installer waits until the terminal shows what it has said; uv fails in the end."""
    add_program(clone / "bin/sleep", f"#!/bin/sh\nexec {shutil.which('sleep')} 0.05\n")
    wait = "until [ -e seen-{0} ]; do sleep 1; done"
    add_program(
        clone / "bin/uv",
        f"""#!/bin/sh
        echo "Resolved 3 packages in 1ms"
        echo "Downloading two-cpu (5.0MiB)"
        {wait.format("uv")}
        exit 1
        """,
    )
    pip = f"""
        case "$*" in
        *ensurepip*) exit ;;
        *editable*) exit 1 ;;
        *"-m pip"*) echo "  Downloading three-1.5-py3-none-any.whl (7 kB)" ;;
        *) exit ;;
        esac
        {wait.format("fetched")}
        mkdir {INSTALLED}/one-1.dist-info
        {wait.format("installed")}
        """
    add_program(clone / "bin/python3", PYTHON % {"installed": INSTALLED} + pip)
    wanted = (clone / "locks/gateway.txt").read_text().count("==")
    signs = {
        "uv": ": 0 of 3 installed, two-cpu (5.0MiB)",
        "fetched": f": 0 of {wanted} installed, three (7 kB)",
        "installed": f": 1 of {wanted} installed\r",
    }
    terminal, end = os.openpty()
    with subprocess.Popen(
        [clone / "scripts" / "setup", "gateway"],
        env={"PATH": str(clone / "bin")},
        stdin=subprocess.DEVNULL,
        stdout=end,
        stderr=end,
    ) as setup:
        os.close(end)
        shown = ""
        with contextlib.suppress(OSError):  # the end of a terminal on Linux
            while part := os.read(terminal, 4096):
                shown += part.decode()
                for step, sign in signs.items():
                    if sign in shown:
                        (clone / f"seen-{step}").touch()
    os.close(terminal)
    assert [step for step, sign in signs.items() if sign not in shown] == []
    assert setup.returncode == 1
    assert "paceline: the project could not be installed" in shown
