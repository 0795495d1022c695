"""The installed package: what lacks for a worker, and the command that adds it."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.cli import main as paceline
from paceline import installation
from workers.doctor.__main__ import main as doctor
from workers.server.main import main as worker

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = installation._MODULES


@pytest.mark.parametrize("module", MODULES["worker"])
def test_without_a_package_of_a_worker_one_sentence_names_the_command_that_installs_it(
    module, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    commands = {"paceline": lambda: paceline(["up"]), "paceline worker": lambda: worker([])}
    commands["paceline doctor"] = lambda: doctor([])
    for name, run in commands.items():
        assert run() == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == (
            "",
            f"{name}: The packages of a worker are not installed. Run `scripts/setup worker`.\n",
        )
    assert worker(["--help"]) == 0


def test_outside_of_a_clone_the_command_installs_the_wheel_with_the_extras_that_are_there(
    monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(installation, "_ROOT", tmp_path)
    source = f"file://{ROOT}"
    command = "uv tool install 'paceline[{}] @ {}'"
    assert installation.install_command("otel") == command.format("otel,worker", source)
    for module in ("mlx", "opentelemetry"):
        monkeypatch.setitem(sys.modules, module, None)
    assert installation.install_command("worker") == command.format("worker", source)
    published = SimpleNamespace(read_text=lambda name: None, version="0.1.0")
    monkeypatch.setattr(installation, "distribution", lambda name: published)
    assert installation.install_command("otel") == "uv tool install 'paceline[otel]==0.1.0'"


def test_each_package_of_a_worker_is_looked_for() -> None:
    brought_by = packages_distributions()
    found = {name.lower() for module in MODULES["worker"] for name in brought_by[module]}
    required = PROJECT["optional-dependencies"]["worker"]
    assert {re.split(r"[^\w-]", text)[0] for text in required} <= found
