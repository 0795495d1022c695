"""The scripts setup, pin-images and with-blas; a failure is one message and leaves nothing half."""

import contextlib
import os
import re
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


def test_a_missing_python_or_compiler_is_reported_in_one_message(clone: Path) -> None:
    """A gateway needs none: setup proceeds to the virtual environment, whose creation fails."""
    python = clone / "bin/python3"
    cases: list[tuple[str, dict[str, str], str]] = [
        ("dev", {}, "paceline: no Python 3.11 or newer found; install one")
    ]
    if sys.platform == "linux":
        cases += [
            ("dev", {"PYTHON": sys.executable}, "paceline: g++ is missing"),
            ("worker", {"PYTHON": sys.executable}, "paceline: g++ is missing"),
            ("gateway", {"PYTHON": str(python)}, f"paceline: '{python} -m venv .venv' failed;"),
        ]
    for lock, environment, message in cases:
        result = set_up(clone, lock, **environment)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith(message)
        assert not (clone / ".venv").exists()
        add_program(python, '#!/bin/sh\n[ "$2" != venv ] || exit 1\n')


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
def test_uv_installs_a_lock_once_and_pip_does_where_uv_cannot(clone, case, calls) -> None:
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
    (clone / "locks" / "gateway.txt").write_text("changed\n")
    set_up(clone, "gateway")
    assert (clone / "calls").exists()


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


FILES = ("docker-compose.yml", "Dockerfile")
# The digest of each call differs, so that a second call must replace the first one's.
DOCKER = """#!/bin/sh
echo "$6" >>looked-up
[ "$6" != "$FAILING" ] || exit 1
printf 'sha256:%064d' "$(wc -l <looked-up)"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of what the script reads and writes, with a scripted docker."""
    for name in (*FILES, "scripts/pin-images", "bin/docker"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    for name in (*FILES, "scripts/pin-images"):
        shutil.copy(ROOT / name, tmp_path / name)
    add_program(tmp_path / "bin" / "docker", DOCKER)
    return tmp_path


def pin(project: Path, failing: str = "", path: str | None = None) -> tuple[int, str]:
    """Return the exit code and the last line of the output."""
    environment = {"PATH": path or f"{project}/bin:/usr/bin:/bin", "FAILING": failing}
    ended = subprocess.run(
        ["/bin/sh", "scripts/pin-images"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, (ended.stdout + ended.stderr).splitlines()[-1]


def read(project: Path) -> list[str]:
    return [line for name in FILES for line in (project / name).read_text().splitlines()]


def test_each_public_image_gets_the_digest_of_its_tag_and_a_second_call_a_new_one(project) -> None:
    before, previous = read(project), {""}
    for _ in range(2):
        assert pin(project)[0] == 0
        pinned = read(project)
        assert [re.sub("@sha256:[0-9]{64}", "", line) for line in pinned] == before
        digests = set(re.findall("@(sha256:[0-9]{64})", "\n".join(pinned)))
        public = [line for line in before if re.match(r"( *image: (?!paceline-)|FROM \S+:)", line)]
        assert len(digests) == len({line.split()[1] for line in public}) == 5
        assert not digests & previous
        previous = digests
    assert "paceline-" not in (project / "looked-up").read_text()


def test_a_failed_look_up_changes_no_file(project: Path) -> None:
    before = read(project)
    (image,) = re.findall(r"image: (redis:\S+)", "\n".join(before))
    code, message = pin(project, failing=image)
    assert code == 1
    assert message == f"paceline: docker cannot look up the digest of {image}; see above."
    assert read(project) == before


def test_without_docker_one_sentence_says_so(project: Path) -> None:
    tools = project / "tools"
    tools.mkdir()
    for name in ("dirname", "sed", "grep", "sort"):
        (tools / name).symlink_to(shutil.which(name) or "")
    assert pin(project, path=str(tools)) == (
        1,
        "paceline: scripts/pin-images needs docker, which is not installed.",
    )


def kernels(**environment: str) -> str:
    """Return the kernels that OpenBLAS selects in a command that is run with it."""
    process = subprocess.run(
        [ROOT / "scripts" / "with-blas", "true"],
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_VERBOSE": "2", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    match = re.search(r"Core: (\w+)", process.stdout + process.stderr)
    assert match is not None, process
    return match[1]


OPENBLAS = [*Path("/usr/lib").glob("*/openblas-pthread/libblas.so.3")]


@pytest.mark.skipif(not OPENBLAS, reason="OpenBLAS is not installed")
@pytest.mark.parametrize("module", ["workers", "workers.doctor", "workers.group.rank"])
def test_each_program_that_computes_restarts_itself_under_openblas_once(module: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", module, "--no-such-option"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "OPENBLAS_VERBOSE": "2", "LD_DEBUG": "files"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    starts = re.findall(r"initialize program: (\S+)", process.stderr)
    shell, restarted = starts.index("/bin/sh"), starts[-1]
    assert (starts[0], starts[shell:].count(restarted)) == (restarted, 1)
    assert "Core: " in process.stdout + process.stderr


@pytest.mark.skipif(
    not OPENBLAS or " avx2 " not in Path("/proc/cpuinfo").read_text(),
    reason="no OpenBLAS, or a processor without a choice of kernels",
)
def test_a_processor_unknown_to_openblas_gets_kernels_of_its_instruction_set_or_those_named() -> (
    None
):
    assert kernels() in {"SkylakeX", "Haswell"}
    assert kernels(OPENBLAS_CORETYPE="Nehalem") == "Nehalem"
