"""The repository: make targets, locks, the package, its imports, the changelog and links."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from tests.support.running_gateway import wait_until
from workers.demo import CHECKPOINT

ROOT = Path(__file__).parents[3]
LOCKS = sorted(ROOT.glob("locks/*.txt"))
SETUP = (ROOT / "scripts/setup").read_text()


def pins(lock: Path) -> dict[str, set[str]]:
    """Return the pinned versions of a lock by distribution."""
    versions: dict[str, set[str]] = {}
    pin = re.compile(r"^([a-z0-9.-]+)(?:\[.*\])?==(\S+)", re.MULTILINE)
    for name, version in pin.findall(lock.read_text()):
        versions.setdefault(name, set()).add(version)
    return versions


def test_make_help_lists_every_target() -> None:
    output = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"^  make (\w+)", output, re.MULTILINE) == [
        *("help", "up", "test", "proofs", "check", "bench", "pictures", "mutants", "lock")
    ]


STOPPED = """#!/bin/sh
case "$*" in
--version) echo Python 3.11.7 ;;
"-m venv"*) mkdir -p .venv/bin && ln -sf "$0" .venv/bin/python && exec sleep 600 ;;
esac
"""
"""A Python that makes half an environment, and then takes long."""


def test_ctrl_c_ends_the_set_up_with_one_sentence_and_no_half_of_it_passes_for_ready(
    tmp_path: Path,
) -> None:
    for folder in ("scripts", "locks", "bin"):
        (tmp_path / folder).mkdir()
    for file in (ROOT / "scripts/setup", ROOT / "pyproject.toml", *LOCKS):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    python = tmp_path / "bin/python3"
    python.write_text(STOPPED)
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "PYTHON": ""}
    with subprocess.Popen(
        [tmp_path / "scripts/setup", "gateway"], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_until((tmp_path / ".venv/bin/python").exists)
        os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate()
    assert process.returncode == 130
    assert printed == "Making .venv with Python 3.11.7 ...\n"
    assert errors == "paceline: set-up was stopped; the same command goes on with it.\n"
    assert not [*tmp_path.glob(".venv/.ready-*")]


def test_there_is_a_lock_for_each_kind_of_machine_with_hashes_and_without_hosts() -> None:
    """S19 (GHSA-5mg7-485q-xm76): pip rejects a replaced file of a locked version."""
    assert [lock.stem for lock in LOCKS] == ["dev", "gateway", "setup", "worker"]
    assert '--require-hashes --requirement "locks/$lock.txt"' in SETUP
    for lock in LOCKS:
        text = lock.read_text()
        assert re.findall(r"\S*://\S*|^--\S+", text, re.MULTILINE) == [], lock
        for requirement in text.replace("\\\n", "").splitlines():
            assert "--hash=sha256:" in requirement, requirement


def test_every_install_is_by_hash_or_of_this_project() -> None:
    """LiteLLM 1.82.7 and 1.82.8 on PyPI were poisoned. `pip wheel` builds with locked packages."""
    files = ("Dockerfile", "Makefile", "README.md", "CONTRIBUTING.md")
    paths = [*(ROOT / name for name in files), *ROOT.glob("scripts/*"), *ROOT.glob("docs/**/*.md")]
    commands = [
        command
        for path in paths
        if path.is_file()
        for line in path.read_text().replace("\\\n", " ").splitlines()
        for command in re.findall(
            r"(?:\b(?:pip3?|uv|uv pip|pipx) (?:install|wheel|sync|add)\b"
            r'|(?:\b\w+_install|"\$\w+") --(?:require-hashes|no-deps))[^`&|]*',
            line,
        )
        if '"$@"' not in command  # the shell functions `pip_install` and `uv_install`
    ]
    locked = [command for command in commands if "--require-hashes" in command]
    assert all("--no-deps" in one for one in locked), "pip must not resolve a lock anew"
    own = [one for one in commands if "--no-deps" in one and one not in locked]
    others = [command for command in commands if command not in (*locked, *own)]
    assert len(locked) == 6
    assert all("--no-build-isolation" in one or "/wheel/*.whl" in one for one in own)
    assert others == ["pip install openai"], "a client's own program"


def test_locks_are_nested_at_the_same_versions_without_mlx_for_the_gateway_and_without_torch() -> (
    None
):
    gateway, worker, dev = (
        pins(ROOT / f"locks/{name}.txt") for name in ("gateway", "worker", "dev")
    )
    assert gateway.items() <= worker.items() <= dev.items()
    assert not [name for name in gateway if name.startswith("mlx")]
    assert not [name for name in dev if name.startswith("torch")]


def test_locks_contain_every_dependency_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {"gateway": project["dependencies"], **project["optional-dependencies"]}
    for kind, requirements in required.items():
        lock = ROOT / f"locks/{kind}.txt"
        locked = pins(lock if lock in LOCKS else ROOT / "locks/dev.txt")  # with all extras
        names = {re.split(r"[^A-Za-z0-9._-]", text)[0].lower() for text in requirements}
        names = {name.replace(".", "-") for name in names}
        assert names <= locked.keys(), kind


def test_the_wheel_contains_the_shipped_policies_and_the_demo_model(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    checkpoint = {str(path.relative_to(ROOT)) for path in CHECKPOINT.rglob("*") if path.is_file()}
    assert any(name.endswith(".safetensors") for name in checkpoint)
    policies = {str(path.relative_to(ROOT)) for path in (ROOT / "policies").rglob("*.yaml")}
    assert len(policies) > 5
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "gateway/pages").rglob("*.*")}
    page |= {"gateway/pages/admin/index.html", "gateway/pages/vendor/uplot/LICENSE"}
    assert {"policies/schema.json", *policies, *checkpoint, *page} <= packed
    assert {name.split("/")[0] for name in packed if ".dist-info/" not in name} == {
        *("gateway", "paceline", "policies", "workers")
    }


def test_the_changelog_has_its_format() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    kinds = {line for line in lines if line.startswith("### ")}
    assert versions[0] == "## [Unreleased]"
    assert all(
        re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", line) for line in versions[1:]
    )
    assert kinds <= {
        f"### {kind}" for kind in "Security Added Changed Deprecated Removed Fixed".split()
    }


def test_every_file_that_the_documentation_links_exists() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", page.read_text()):
            assert (page.parent / "".join(target)).exists(), f"{page.name}: {target}"


def test_the_gateway_loads_on_a_host_without_mlx() -> None:
    program = """
import sys
for name in ("mlx", "mlx_lm", "mlx_vlm", "transformers", "numpy", "PIL"):
    sys.modules[name] = None
import importlib, pkgutil
import gateway
for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
