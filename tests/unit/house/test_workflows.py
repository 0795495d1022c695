"""Workflows of GitHub: they parse, pin what they use, and run commands that exist."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command_lines import check_usage

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps() -> Iterator[dict[str, Any]]:
    for file in WORKFLOWS:
        # `on` is a boolean in YAML 1.1, which PyYAML reads.
        workflow = yaml.safe_load(file.read_text())
        assert workflow.keys() >= {"name", True, "permissions", "jobs"}, file.name
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] <= 60
            yield from job["steps"]


LINES = {step["run"].splitlines()[0] for step in steps() if "run" in step}
COMMANDS = [shlex.split(line) for line in sorted(LINES)]


def test_each_action_is_pinned_by_its_commit_and_a_workflow_runs_on_a_mac() -> None:
    actions = [step["uses"] for step in steps() if "uses" in step]
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions)
    assert any("runs-on: macos-15" in file.read_text() for file in WORKFLOWS)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_each_command_exists(command: list[str]) -> None:
    program, *arguments = command
    if program in (".venv/bin/paceline", "~/.local/bin/paceline"):
        check_usage(arguments)
    elif program == ".venv/bin/python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(f"\n{target}: ##" in makefile for target in arguments)
    elif program == "sh":
        assert (ROOT / "deploy" / Path(arguments[0]).name).exists()
    else:
        scripts = ("scripts/setup", "scripts/wheel")
        assert program in (".venv/bin/python", *scripts, "mkdir", "ruby", "gh")
    for path in arguments:
        if path.startswith("tests/"):
            assert (ROOT / path).exists(), path


def test_each_python_program_compiles() -> None:
    commands = "\n".join(step.get("run", "") for step in steps())
    programs = re.findall(r"<<'PYTHON'\n(.*?)PYTHON", commands, re.DOTALL)
    assert programs
    for program in programs:
        compile(program, "workflow", "exec")


def test_a_release_is_published_by_a_tag_after_its_tests_without_a_stored_secret() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert [jobs[name].get("needs") for name in ("build", "mac", "pypi", "github")] == [
        *(None, "build", "mac", "pypi")
    ]
    permissions = {name: job.get("permissions", {"contents": "read"}) for name, job in jobs.items()}
    assert permissions == {
        "build": {"contents": "read"},
        "mac": {"contents": "read"},
        "pypi": {"id-token": "write"},
        "github": {"contents": "write"},
    }
    assert jobs["pypi"]["environment"] == "pypi"
    assert re.findall(r"secrets\.|password:", text) == []
