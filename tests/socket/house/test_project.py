"""The repository: make targets, locks, the package, its imports, the changelog and links."""

import contextlib
import hashlib
import importlib.metadata
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from paceline.installation import COMMIT_FILE, commit_of
from tests.support.running_gateway import wait_until
from tests.support.wheel import VERSION, WHEEL, build_wheel, run_wheel
from workers.demo import CHECKPOINT

ROOT = Path(__file__).parents[3]
REPOSITORY = "https://example.org/team/paceline"
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
        *("help", "up", "test", "proofs", "check", "bench", "pictures", "mutants", "lock", "wheel")
    ]


STOPPED = """#!/bin/sh
case "$*" in
--version) echo Python 3.11.7 ;;
"-m venv"*) mkdir -p .venv/bin && ln -sf "$0" .venv/bin/python ;;
esac
case "$*" in STAGE*) : >stage && exec sleep 600 ;; esac
"""
"""A Python that takes long for a stage of the set-up."""


@pytest.mark.parametrize("stage", ["-m venv", "-m pip install"])
def test_ctrl_c_ends_the_set_up_with_one_sentence_and_no_half_of_it_passes_for_ready(
    tmp_path: Path, stage: str
) -> None:
    for folder in ("scripts", "locks", "bin"):
        (tmp_path / folder).mkdir()
    for file in (ROOT / "scripts/setup", ROOT / "pyproject.toml", *LOCKS):
        shutil.copy(file, tmp_path / file.relative_to(ROOT))
    python = tmp_path / "bin/python3"
    python.write_text(STOPPED.replace("STAGE", f'"{stage}"'))
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "PYTHON": ""}
    terminal, output = pty.openpty()
    with subprocess.Popen(
        [tmp_path / "scripts/setup", "gateway"], env=environment, start_new_session=True,
        stdout=output, stderr=output,
    ) as process:  # fmt: skip
        wait_until((tmp_path / "stage").exists)
        os.killpg(process.pid, signal.SIGINT)
    os.close(output)
    printed = ""
    with os.fdopen(terminal) as output_of, contextlib.suppress(OSError):  # the end of a terminal
        while line := output_of.readline():
            printed += line
    assert process.returncode == 130
    sentence = "paceline: set-up was stopped; the same command goes on with it.\n"
    assert printed.endswith(f"\n{sentence}")
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
    paths = [*(ROOT / name for name in files), ROOT / "deploy/install.sh"]
    paths += [*ROOT.glob("scripts/*"), *ROOT.glob("docs/**/*.md")]
    commands = [
        command
        for path in paths
        if path.is_file()
        for line in path.read_text().replace("\\\n", " ").splitlines()
        for command in re.findall(
            r"(?:\b(?:pip3?|uv|uv pip|pipx|tool) (?:install|wheel|sync|add)\b"
            r'|(?:\b\w+_install|"\$\w+") --(?:require-hashes|no-deps))[^`&|]*',
            line,
        )
        if '"$@"' not in command  # the shell functions `pip_install` and `uv_install`
    ]
    locked = [command for command in commands if "--require-hashes" in command]
    assert all("--no-deps" in one for one in locked), "pip must not resolve a lock anew"
    own = [one for one in commands if "--no-deps" in one and one not in locked]
    wheels = [one for one in commands if re.search(r"^(tool|pipx) .*(whl|\$wheel)", one)]
    others = [command for command in commands if command not in (*locked, *own, *wheels)]
    assert len(locked) == 6
    assert all("--no-build-isolation" in one or "/wheel/*.whl" in one for one in own)
    assert all("--constraints" in one for one in wheels if one.startswith("tool"))
    assert others == ["pip install openai"], "a client's own program"
    named = "".join(path.read_text() for path in paths if path.suffix == ".md")
    assert set(re.findall(r"paceline-[^ ']*\.whl", named)) == {WHEEL}, "no index has it"


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


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """Build a release; return its folder."""
    return build_wheel(tmp_path_factory.mktemp("release"), REPOSITORY).parent


def test_the_wheel_contains_the_shipped_policies_and_the_demo_model(release: Path) -> None:
    packed = set(zipfile.ZipFile(release / WHEEL).namelist())
    checkpoint = {str(path.relative_to(ROOT)) for path in CHECKPOINT.rglob("*") if path.is_file()}
    assert any(name.endswith(".safetensors") for name in checkpoint)
    policies = {str(path.relative_to(ROOT)) for path in (ROOT / "policies").rglob("*.yaml")}
    assert len(policies) > 5
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "gateway/pages").rglob("*.*")}
    page |= {"gateway/pages/admin/index.html", "gateway/pages/vendor/uplot/LICENSE"}
    guide = {f"gateway/guide/{path.relative_to(ROOT)}" for path in ROOT.glob("docs/**/*.md")}
    page |= {*guide, "gateway/guide/mkdocs.yml"}
    assert {"policies/schema.json", "workers/with-blas", *policies, *checkpoint, *page} <= packed
    assert {name.split("/")[0] for name in packed if ".dist-info/" not in name} == {
        *("gateway", "paceline", "policies", "workers")
    }


def test_the_wheel_names_its_author_its_repository_and_its_commit(release: Path) -> None:
    (distribution,) = importlib.metadata.distributions(name="paceline", path=[str(release / WHEEL)])
    facts = distribution.metadata
    assert facts["Author"] == "The Paceline authors"
    assert {classifier.split(" :: ")[0] for classifier in facts.get_all("Classifier") or ()} >= {
        *("Development Status", "Operating System", "Programming Language", "Topic")
    }
    assert facts.get_all("Project-URL") == [
        f"Source, {REPOSITORY}",
        f"Issues, {REPOSITORY}/issues",
        f"Changelog, {REPOSITORY}/blob/main/CHANGELOG.md",
    ]
    readme = distribution.read_text("METADATA") or ""
    links = re.findall(r'\]\((?!#)([^)]*)|src(?:set)?="([^"]*)', readme)
    assert len(links) > 20
    assert all("".join(link).startswith("https://") for link in links)
    assert f'src="{REPOSITORY}/raw/v{VERSION}/docs/request.svg"' in readme
    assert f"]({REPOSITORY}/blob/v{VERSION}/docs/install.md)" in readme
    commit = distribution.read_text(COMMIT_FILE)
    assert commit == commit_of(ROOT) != ""


def test_a_commit_is_that_of_a_clone_and_says_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    (tmp_path / "file").write_text("one")
    assert commit_of(tmp_path) == ""
    git("init", "-q")
    assert commit_of(tmp_path) == "", "there is no commit yet"
    git("add", "file")
    git("commit", "-q", "-m", "one")
    git("tag", "v9")
    commit = git("rev-parse", "--short=12", "HEAD").strip()
    assert commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    assert commit_of(tmp_path / "file") == "", "a folder within a clone is none"


def test_a_release_has_checksums_and_an_installer_and_a_formula_with_its_addresses(release) -> None:
    names = [WHEEL, "constraints.txt", "install.sh", "paceline.rb"]
    digests = {name: hashlib.sha256((release / name).read_bytes()).hexdigest() for name in names}
    lines = (release / "SHA256SUMS").read_text().splitlines()
    assert lines == [f"{digest}  {name}" for name, digest in digests.items()]
    assert (release / "constraints.txt").read_text() == (ROOT / "locks/worker.txt").read_text()
    address = f"{REPOSITORY}/releases/download/v{VERSION}"
    installer = (release / "install.sh").read_text()
    assert f"\nrelease={address}\nwheel={WHEEL}\n" in installer
    assert f"\nwheel_sha256={digests[WHEEL]}\n" in installer
    assert f"\nconstraints_sha256={digests['constraints.txt']}\n" in installer
    formula = (release / "paceline.rb").read_text()
    assert re.findall(r"@[A-Z_]+@", formula) == []
    found = re.findall(
        r'url "(.*)", using: :nounzip\n *(?:version "(.*)"\n *)?sha256 "(.*)"', formula
    )
    assert found == [
        (f"{address}/{WHEEL}", VERSION, digests[WHEEL]),
        (f"{address}/constraints.txt", "", digests["constraints.txt"]),
    ]


def test_the_formula_has_the_form_of_one_and_a_service_that_restarts_after_a_failure() -> None:
    """A Mac with Homebrew has not tried it."""
    file = ROOT / "deploy/paceline.rb"
    formula = file.read_text()
    opened = re.findall(r"^ *(?:class|def)\b|\bdo$", formula, re.MULTILINE)
    assert len(opened) == len(re.findall(r"^ *end$", formula, re.MULTILINE)) == 6
    assert "class Paceline < Formula\n" in formula
    service = formula.partition("  service do\n")[2].partition("  end\n")[0]
    assert [line.strip() for line in service.splitlines()] == [
        'run [opt_bin/"paceline", "up"]',
        "keep_alive successful_exit: false",
        "process_type :interactive",
        'log_path var/"log/paceline.log"',
        'error_log_path var/"log/paceline.log"',
    ]
    if ruby := shutil.which("ruby"):
        subprocess.run([ruby, "-c", file], check=True, capture_output=True)


@pytest.mark.parametrize("repository", ["http://example.org/a", "https://example.org/a#b", "a"])
def test_only_the_address_of_a_repository_makes_a_release(repository, tmp_path) -> None:
    ended = run_wheel(tmp_path / "dist", repository)
    assert (ended.returncode, ended.stderr) == (
        1,
        f"paceline: '{repository}' is not the address of a repository, such as "
        "https://example.org/team/paceline.\n",
    )
    assert not (tmp_path / "dist").exists()


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
