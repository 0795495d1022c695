"""deploy/install.sh, with a scripted uv and curl: what it says, does, refuses and removes."""

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.wheel import WHEEL

ROOT = Path(__file__).parents[3]
SCRIPT = (ROOT / "deploy/install.sh").read_text()
TOOLS = (
    *("sh", "basename", "cat", "chmod", "cp", "cut", "dirname", "env", "mkdir", "mktemp", "mv"),
    *("rm", "sha256sum", "shasum"),
)
RELEASE = "https://example.org/team/paceline/releases/download/v1"
UV_VERSION = re.search(r"^uv==(\S+)", (ROOT / "locks/setup.txt").read_text(), re.MULTILINE)[1]  # type: ignore[index]
UV = """#!/bin/sh
echo "uv $@" >>"$HOME/calls"
case "$*" in
*" install "*)
    printf '#!/bin/sh\\necho paceline 1\\n' >"$UV_TOOL_BIN_DIR/paceline"
    chmod +x "$UV_TOOL_BIN_DIR/paceline"
    ;;
esac
"""
CURL = """#!/bin/sh
while [ "$1" != -fLsS ]; do shift; done
echo "curl $2" >>"$HOME/calls"
cp "$HOME/web/${2##*/}" "$4" 2>/dev/null || { echo "no route" >&2 && exit 6; }
"""
INSTALLER = """mkdir -p "$UV_INSTALL_DIR"
cp "$HOME/uv" "$UV_INSTALL_DIR/uv"
echo "installer $UV_NO_MODIFY_PATH" >>"$HOME/calls"
"""


class Machine:
    """A home folder, the files that `make wheel` builds, and a PATH with few tools."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.dist = home / "dist of it"
        self.bin = home / ".local/bin"
        self.web = home / "web"
        for folder in (self.dist, self.bin, self.web, home / "bin"):
            folder.mkdir(parents=True)
        (self.dist / "install.sh").write_text(SCRIPT)
        for folder in (self.dist, self.web):
            (folder / WHEEL).write_text("wheel")
            (folder / "constraints.txt").write_text("click==8.5.1\n")
        for name in TOOLS:
            if found := shutil.which(name):
                (home / "bin" / name).symlink_to(found)
        self.add("uname", '#!/bin/sh\n[ "$1" = -s ] && echo Linux || echo x86_64\n')
        self.add("curl", CURL)
        self.add("uv", UV)

    def add(self, name: str, text: str) -> None:
        for path in (self.home / name, self.home / "bin" / name):
            path.write_text(text)
            path.chmod(0o755)

    def use_release(self) -> None:
        """Fill in the script as `scripts/wheel` does."""
        text = SCRIPT.replace("\nrelease=", f"\nrelease={RELEASE}")
        text = text.replace("\nwheel=", f"\nwheel={WHEEL}")
        for name, file in (("wheel", WHEEL), ("constraints", "constraints.txt")):
            digest = hashlib.sha256((self.web / file).read_bytes()).hexdigest()
            text = text.replace(f"\n{name}_sha256=", f"\n{name}_sha256={digest}")
        (self.dist / "install.sh").write_text(text)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(self.dist / "install.sh"), *arguments],
            env={"PATH": str(self.home / "bin"), "HOME": str(self.home)},
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        file = self.home / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def install_call(folder: Path, extra: str = "[worker]") -> str:
    return (
        f"uv tool install --python 3.13 --reinstall-package paceline --constraints "
        f"{folder}/constraints.txt {folder}/{WHEEL}{extra}"
    )


@pytest.mark.parametrize(
    ("flags", "extra", "command"),
    [((), "[worker]", "up"), (("--gateway",), "", "gateway")],
)
def test_the_wheel_beside_it_is_installed_with_the_packages_of_a_worker_unless_refused(
    machine: Machine, flags, extra, command
) -> None:
    ended = machine.run(*flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert machine.calls == [install_call(machine.dist, extra)]
    assert ("the packages of a worker" in ended.stdout) == bool(extra)
    assert ended.stdout.endswith(f"Installed paceline 1.\nNext: paceline {command}\n")
    named = machine.run(*flags, f"dist of it/{WHEEL}")
    assert (named.stdout, machine.calls[1:]) == (ended.stdout, machine.calls[:1])


def test_a_dry_run_says_all_that_would_be_done_and_does_nothing(machine: Machine) -> None:
    machine.use_release()
    for name in ("uv", "bin/uv"):
        (machine.home / name).unlink()
    before = sorted(machine.home.rglob("*"))
    ended = machine.run("--dry-run")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(machine.home.rglob("*")) == before
    for promise in (f"fetch uv {UV_VERSION}", f"install {RELEASE}/{WHEEL} and", str(machine.bin)):
        assert promise in ended.stdout
    assert "no sudo" in ended.stdout


def test_a_missing_uv_is_fetched_in_the_version_of_the_lock_and_changes_no_shell(machine) -> None:
    (machine.home / "bin/uv").unlink()
    (machine.web / "install.sh").write_text(INSTALLER)
    assert machine.run().returncode == 0
    address = f"https://astral.sh/uv/{UV_VERSION}/install.sh"
    assert machine.calls == [f"curl {address}", "installer 1", install_call(machine.dist)]
    (machine.home / "calls").unlink()
    assert machine.run().returncode == 0
    assert machine.calls == [install_call(machine.dist)], "the fetched uv is found again"


def test_a_release_is_fetched_compared_and_kept_until_it_is_uninstalled(machine: Machine) -> None:
    machine.use_release()
    ended = machine.run()
    assert (ended.returncode, ended.stderr) == (0, "")
    kept = machine.home / ".local/share/paceline"
    names = (WHEEL, "constraints.txt")
    fetched = [f"curl {RELEASE}/{name}" for name in names]
    assert machine.calls == [*fetched, install_call(kept)]
    assert {file.name for file in kept.iterdir()} == set(names)
    (machine.home / "calls").unlink()
    state = f"{machine.home}/.paceline"
    said = machine.run("--uninstall", "--dry-run")
    assert (said.returncode, state in said.stdout, machine.calls) == (0, True, [])
    assert kept.exists()
    ended = machine.run("--uninstall")
    assert (ended.stdout, machine.calls) == (said.stdout, ["uv tool uninstall paceline"])
    assert not kept.exists()


@pytest.mark.parametrize("changed", [WHEEL, "constraints.txt"])
def test_a_changed_file_of_a_release_is_refused_before_it_is_installed(machine, changed) -> None:
    machine.use_release()
    (machine.web / changed).write_text("changed")
    ended = machine.run()
    assert (ended.returncode, ended.stderr) == (
        1,
        f"paceline: the files at {RELEASE} are not those of this release.\n",
    )
    assert not any(call.startswith("uv") for call in machine.calls)
    assert not (machine.home / ".local/share").exists()


INTEL = '#!/bin/sh\n[ "$1" = -s ] && echo Darwin || echo x86_64\n'
REFUSALS = {
    "an Intel Mac": ((), "MLX needs a Mac with Apple silicon", lambda m: m.add("uname", INTEL)),
    "another system": (
        (),
        "macOS and on Linux",
        lambda m: m.add("uname", "#!/bin/sh\necho FreeBSD\n"),
    ),
    "no wheel": (
        (),
        "there is no wheel beside this script; run `make wheel`",
        lambda m: (m.dist / WHEEL).unlink(),
    ),
    "two wheels": (
        (),
        "there are several wheels",
        lambda m: (m.dist / "paceline-9-py3-none-any.whl").touch(),
    ),
    "no such wheel": (("a.whl",), "there is no file a.whl.", lambda m: None),
    "no constraints": (
        (),
        "constraints.txt is missing",
        lambda m: (m.dist / "constraints.txt").unlink(),
    ),
    "an option": (("--user",), "there is no option --user.", lambda m: None),
    "two arguments": (("a.whl", "b.whl"), "b.whl is one argument too many.", lambda m: None),
    "a wheel to remove": (("--uninstall", "a.whl"), "--uninstall takes no wheel.", lambda m: None),
    "no uv to remove with": (
        ("--uninstall",),
        "uv is not here",
        lambda m: (m.home / "bin/uv").unlink(),
    ),
    "no way to uv": (
        (),
        f"https://astral.sh/uv/{UV_VERSION}/install.sh could not be fetched",
        lambda m: (m.home / "bin/uv").unlink(),
    ),
    "uv fails": ((), "uv could not install Paceline", lambda m: m.add("uv", "#!/bin/sh\nexit 2\n")),
}


@pytest.mark.parametrize(("arguments", "sentence", "prepare"), REFUSALS.values(), ids=REFUSALS)
def test_each_obstacle_is_one_sentence_and_installs_nothing(
    machine: Machine, arguments, sentence, prepare
) -> None:
    prepare(machine)
    ended = machine.run(*arguments)
    assert ended.returncode == 1
    assert sentence in ended.stderr.splitlines()[-1]
    assert ended.stderr.splitlines()[-1].startswith("paceline: ")
    assert not (machine.bin / "paceline").exists()
    assert not [call for call in machine.calls if call.startswith("uv")]


def test_an_intel_mac_gets_a_gateway(machine: Machine) -> None:
    machine.add("uname", INTEL)
    assert machine.run("--gateway").returncode == 0


def test_the_scripts_pass_shellcheck() -> None:
    scripts = [ROOT / "deploy/install.sh", *sorted((ROOT / "scripts").iterdir())]
    command = ["shellcheck", "--severity=warning", *map(str, scripts)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""
    assert subprocess.run(["shellcheck", *command[2:3]], check=False).returncode == 0
