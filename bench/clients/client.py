"""A client: a program with the packages that its first lines name, installed apart from all others.

A new client needs one file in `programs/`. Its head lists its packages in the form of PEP 723, for
npm too, each with its version:

    # /// script
    # dependencies = ["openai==3.54.0"]
    # [tool.paceline]
    # npm = ["ai@6.0.326"]
    # scripted = true
    # ///

With `scripted`, the program meets the scripted worker of `scripted.py` in place of the demo model.

The program runs in a new folder, which is its home too, with the commands of its packages on its
path, and prints one JSON object a line: `case`, `works` and `result`; `cases.py` does so for
programs in Python.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.harness.processes import exit_at_sigterm, kill_session
from bench.harness.venvs import PeerUnavailable, Venv, last_line, python_of

PROGRAMS: Final = Path(__file__).parent / "programs"
_ROOT: Final = Path(__file__).parents[2]
_PREFIX: Final = "with_"
_TIMEOUT_S: Final = 1800.0
_STOP_S: Final = 10.0
_HEAD: Final = re.compile(r"^(?:#|//) /// script\n((?:(?:#|//).*\n)+?)(?:#|//) ///$", re.MULTILINE)
_ENVIRONMENT: Final = {"DO_NOT_TRACK": "1", "COLUMNS": "200", "NO_COLOR": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one case."""

    case: str
    works: bool
    result: str
    runs: tuple[str, ...] = ()
    """The ways in which it worked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A program and the packages that it needs."""

    program: Path
    python_packages: tuple[str, ...] = ()
    npm_packages: tuple[str, ...] = ()
    scripted: bool = False
    """Whether it meets the scripted worker in place of the demo model."""

    @property
    def name(self) -> str:
        return self.program.stem.removeprefix(_PREFIX).replace("_", "-")

    @property
    def packages(self) -> str:
        return ", ".join((*self.python_packages, *self.npm_packages))

    @classmethod
    def read(cls, program: Path) -> "Client":
        found = _HEAD.search(program.read_text())
        lines = found[1].splitlines() if found else []
        head = tomllib.loads("\n".join(re.sub(r"^(?:#|//) ?", "", line) for line in lines))
        own = head.get("tool", {}).get("paceline", {})
        return cls(
            program=program,
            python_packages=tuple(head.get("dependencies", ())),
            npm_packages=tuple(own.get("npm", ())),
            scripted=own.get("scripted", False),
        )

    def run(self, environments: Path, variables: Mapping[str, str]) -> Iterator[Result]:
        """Install what is missing, run the program, and yield the results of its cases."""
        try:
            python, folders = Path(sys.executable), []
            if self.python_packages:
                venv = Venv(name=_folder_name(self.python_packages), pins=self.python_packages)
                python = python_of(venv, environments)
                folders.append(python.parent)
            program = [str(python), "-m", f"bench.clients.programs.{self.program.stem}"]
            if self.npm_packages:
                modules = _install_npm(
                    self.npm_packages, environments / _folder_name(self.npm_packages)
                )
                folders.append(modules / ".bin")
                if self.program.suffix == ".mjs":  # it imports from the folder that it is in
                    copy = shutil.copy(self.program, modules.parent)
                    program = [str(modules / ".bin" / "node"), str(copy)]
            yield from _run(program, folders, variables)
        except PeerUnavailable as error:
            yield Result(case="install", works=False, result=str(error))


def clients() -> list[Client]:
    return [
        Client.read(program)
        for program in sorted(PROGRAMS.glob(f"{_PREFIX}*"))
        if program.suffix in (".py", ".mjs")
    ]


def _run(program: list[str], folders: list[Path], variables: Mapping[str, str]) -> Iterator[Result]:
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    with tempfile.TemporaryDirectory(prefix="paceline-client-") as home:
        places = {"PATH": path, "HOME": home, "PYTHONPATH": str(_ROOT)}
        exit_at_sigterm()
        process = subprocess.Popen(
            program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=home,
            env={**_ENVIRONMENT, **variables, **places},
            start_new_session=True,
        )
        try:
            printed, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _stop(process)
            printed, errors = process.communicate()
            errors += f"\nended after {_TIMEOUT_S:.0f} s"
        finally:
            _stop(process)
    results = [_parse(line) for line in printed.splitlines() if line.startswith('{"case"')]
    yield from results
    if process.returncode or not results:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        reason = " / ".join(lines[-3:])[:400] or "it printed no result"
        yield Result(case="run", works=False, result=reason)


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop a program: it ends what it has started in other sessions."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    kill_session(process.pid)


def _folder_name(packages: tuple[str, ...]) -> str:
    """Return a name for the environment of all programs with these packages."""
    return "client-" + re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(packages)).strip("-")


def _parse(line: str) -> Result:
    fields: dict[str, Any] = json.loads(line)
    return Result(
        case=fields["case"],
        works=fields["works"],
        result=fields["result"],
        runs=tuple(fields.get("runs", ())),
    )


def _install_npm(packages: tuple[str, ...], home: Path) -> Path:
    """Return the folder of installed npm packages; install them if they are not as pinned."""
    modules, stamp = home / "node_modules", home / "installed"
    if stamp.is_file() and stamp.read_text() == " ".join(packages):
        return modules
    npm = shutil.which("npm")
    if npm is None:
        raise PeerUnavailable("needs npm")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / "package.json").write_text("{}")
    log = home / "install.log"
    with log.open("wb") as output:
        # The packages of `node` and of some clients fetch their binary in a script.
        words = [npm, "install", "--no-audit", "--no-fund", *packages]
        done = subprocess.run(words, cwd=home, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise PeerUnavailable(f"not installable: {last_line(log)}")
    stamp.write_text(" ".join(packages))
    return modules
