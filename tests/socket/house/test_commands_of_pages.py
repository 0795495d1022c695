"""The commands of README, CONTRIBUTING and docs: each parses, and runs or says why it does not."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
import pytest
from pydantic import SecretStr

from gateway.cli import main
from paceline.settings import InvalidSettings
from tests.support.command_lines import (
    ROOT,
    CommandLine,
    check_usage,
    lines_in_sentences,
    lines_of_blocks,
)
from tests.support.gateway_fixtures import gateway_of_module
from tests.support.running_gateway import RunningGateway, running_worker

API_KEY = "pk-of-the-commands-of-pages"
LINES = sorted(set(lines_of_blocks()))
MENTIONS = sorted(set(lines_in_sentences()))
CLIENT = "a program of others, which needs a model of the reader"
INSTALLS = "it installs from an index; test_install_script.py and test_wheel.py do so"
NOT_RUN = {
    "paceline up": "it serves until its end; test_up.py runs it",
    "paceline worker": "it serves until its end; test_worker_start.py runs it",
    "paceline join": "it becomes a worker; test_join.py and test_shelf_of_macs.py run it",
    "paceline join-engine": "it needs another machine; test_engines.py joins engines",
    "paceline prefix-cache clear": "it needs a real cache; test_prefix_deletion.py empties one",
    "paceline bench": "it measures for minutes; test_bench.py runs it",
    "make": "it takes minutes; its targets are checked",
    "sh dist/install.sh": "test_install_script.py runs it; its options are checked",
    "scripts/make-env": "test_compose.py runs it",
    "docker": "it needs Docker; test_compose.py reads its file",
    "redis-cli": "it comes with Redis",
    "rm": "it deletes the state folder for good",
    "uv": INSTALLS,
    "pipx": INSTALLS,
    "paceline service": "it changes the services of this machine; test_service.py runs it",
    **dict.fromkeys(
        ("paceline backup", "paceline restore"), "it asks for a passphrase; test_backup.py runs it"
    ),
    "paceline upgrade": "it replaces this installation; test_service.py runs it",
    "export": "it sets a variable for the next command",
    **dict.fromkeys(("claude", "opencode", "llm", "aiperf", "lm_eval"), CLIENT),
}


def reason_of(line: CommandLine) -> str:
    """Return why a command does not run here, or an empty text."""
    command = " ".join((line.program, *line.arguments))
    return next(
        (why for start, why in NOT_RUN.items() if f"{command} ".startswith(f"{start} ")), ""
    )


def label(line: CommandLine) -> str:
    return f"{Path(line.page).stem}: {' '.join((line.program, *line.arguments))[:60]}"


RUN = [line for line in LINES if not reason_of(line)]


def test_the_pages_have_commands_and_no_reason_is_left_over() -> None:
    assert len(RUN) > 20
    used = {reason_of(line) for line in LINES}
    assert set(NOT_RUN.values()) <= used
    assert {line.program for line in RUN} == {"paceline", "curl", "df", "du"}


def problem_of(line: CommandLine) -> str:
    """Return what the command line of Paceline says of a command, or an empty text."""
    try:
        with mock.patch.dict(os.environ, line.variables):
            check_usage(line.arguments)
    except click.MissingParameter as missing:
        return "" if line in MENTIONS else str(missing)  # a sentence may leave arguments out
    except (click.UsageError, InvalidSettings) as error:
        return str(error)
    return ""


def test_each_command_of_a_page_or_a_message_exists_with_its_options_and_values() -> None:
    lines = [*(line for line in LINES if line.program == "paceline"), *MENTIONS]
    problems = {line.text: problem_of(line) for line in lines}
    assert {text: problem for text, problem in problems.items() if problem} == {
        "paceline ARGUMENTS": "No such command 'ARGUMENTS'.",
        "paceline COMMAND --help": "No such command 'COMMAND'.",
        "paceline NAME": "No such command 'NAME'.",
        "paceline worker --label": "Option '--label' requires an argument.",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        *("stauts", "keys lst", "keys revoke", "keys create a --limit b", "status --colour"),
        *("up now", "worker --prot 1", "worker --port x", "worker --rows 0", "doctor --seconds 0"),
    ],
)
def test_a_command_line_that_paceline_refuses_has_a_problem(wrong: str) -> None:
    assert problem_of(CommandLine("", "", "paceline", tuple(wrong.split())))


def test_each_target_and_option_of_a_command_that_does_not_run_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installer = (ROOT / "deploy/install.sh").read_text()
    for line in LINES:
        if line.program == "make":
            assert f"\n{line.arguments[0]}: ##" in makefile, line
        elif line.program == "sh":
            options = [one for one in line.arguments[1:] if one.startswith("-")]
            assert all(f"    {one})" in installer for one in options), line
        elif line.program.startswith("scripts/"):
            assert (ROOT / line.program).exists(), line


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[tuple[RunningGateway, str]]:
    """Run a gateway with a worker and an engine, on a machine of which it has the state folder."""
    home = tmp_path_factory.mktemp("machine")
    (home / "policy.yaml").write_bytes((ROOT / "policies/default.yaml").read_bytes())
    (home / ".paceline").mkdir(mode=0o700)
    with (
        running_worker("studio") as worker,
        running_worker("lmstudio", model="qwen") as engine,
        gateway_of_module(home / ".paceline", worker, api_key=SecretStr(API_KEY)) as gateway,
    ):
        yield gateway, engine.url


@pytest.fixture
def user(machine, monkeypatch) -> Iterator[RunningGateway]:
    """Be the user of that machine in its home; return the gateway."""
    gateway, engine_url = machine
    home = gateway.state_dir.parent
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("PACELINE_STATE_DIR")
    monkeypatch.setenv("PACELINE_PORT", gateway.url.rpartition(":")[2])
    monkeypatch.setenv("PACELINE_API_KEY", API_KEY)
    engine = {"id": "192.168.1.20-1234", "kind": "openai", "url": engine_url}
    gateway.admin.post("/admin/v1/engines", json={**engine, "models": ["qwen"]})
    gateway.admin.post("/admin/v1/keys", json={"name": "Ann"})
    yield gateway
    main(["keys", "revoke", "Ann"])
    gateway.admin.delete("/admin/v1/workers/studio/cordon")


@pytest.mark.parametrize("line", RUN, ids=label)
def test_each_command_of_a_page_runs(line: CommandLine, user) -> None:
    if line.arguments[:2] == ("keys", "create"):
        assert main(["keys", "revoke", "Ann"]) == 0
    if line.program == "paceline":
        assert main([*line.arguments]) == 0
    else:
        command = line.text.replace("http://127.0.0.1:8000", user.url)
        command = command.replace("curl ", "curl --silent --show-error --fail ", 1)
        subprocess.run(["sh", "-c", command], check=True, capture_output=True)
