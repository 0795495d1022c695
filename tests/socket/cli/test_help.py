"""Help, version, completion and usage errors of every command."""

import re
import socket
import subprocess
from collections.abc import Collection, Iterator
from importlib.metadata import version

import click
import pytest

from gateway.cli import main
from gateway.cli.commands import paceline
from paceline.request.profile import Priority
from tests.support.paceline_forks import PIPES, PacelineFork
from workers.server.main import worker_command
from workers.settings import WorkerSettings

# Each of them takes a tenth of a second of CPU time or more to import.
HEAVY = {"fastapi", "httpx", "pydantic", "rich", "uvicorn", "yaml"}
Path_ = tuple[str, ...]


def commands_of(group: click.Group, path: Path_ = ()) -> Iterator[tuple[Path_, click.Command]]:
    """Yield every command of a group with its path, and those of its groups."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands_of(command, (*path, name))


ENGINE_COMMANDS = ("worker", "doctor")
"""They become another process, which prints their help."""
COMMANDS = {
    path: command for path, command in commands_of(paceline) if path[0] not in ENGINE_COMMANDS
}


def run(
    *arguments: str, heavy: Collection[str] = HEAVY, module: str = "gateway.cli", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `paceline` in a process that fails if it has imported a heavy package."""
    program = f"""
import contextlib, sys
from {module} import main
try:
    sys.exit(main(sys.argv[1:]))
finally:
    assert not {heavy!r} & {{name.partition(".")[0] for name in sys.modules}}, "slow"
"""
    command = ["-c", program, *arguments]
    with PacelineFork(command, **PIPES, env=environment, imported="gateway.cli") as process:
        printed, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, printed, errors)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_main_help_lists_every_command_and_imports_none(arguments: Path_) -> None:
    process = run(*arguments)
    assert (process.returncode, process.stderr) == (0, "")
    assert all(f"\n  {name} " in process.stdout for name in paceline.commands)
    commit = r"\([0-9a-f]{12}(-dirty)?\)"
    assert re.fullmatch(rf"paceline {version('paceline')} {commit}\n", run("--version").stdout)


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_each_command_prints_its_usage_and_explains_every_argument(path, capsys) -> None:
    assert main([*path, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: paceline {' '.join(path)}")
    assert COMMANDS[path].help


def test_help_and_errors_of_a_command_import_neither_it_nor_its_libraries() -> None:
    for arguments in (("bench", "--help"), ("keys",)):
        assert run(*arguments).returncode == 0
    process = run("up", "--prot", "8000")
    assert process.returncode == 2
    assert process.stderr == (
        "paceline: There is no option '--prot'; did you mean '--port'? See `paceline up --help`.\n"
    )


@pytest.mark.parametrize(
    ("command", "wrong", "problem"),
    [
        ("worker", "--prot 1", "There is no option '--prot'; did you mean '--port'?"),
        ("doctor", "--seconds 0", "--seconds: '0' is not a time between 1 and 3600 seconds."),
    ],
)
def test_a_command_of_the_engine_prints_its_own_help_and_errors(command, wrong, problem) -> None:
    shown = run(command, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"Usage: paceline {command} [OPTIONS]")
    refused = run(command, *wrong.split())
    assert (refused.returncode, refused.stdout) == (2, "")
    expected = f"paceline {command}: {problem} See `paceline {command} --help`.\n"
    assert refused.stderr == expected


@pytest.mark.parametrize(
    "command", ["ask Hi", "errors", "keys list", "policy show", "engines list", "status"]
)
def test_a_command_without_a_gateway_says_so_before_it_imports_an_http_client(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    process = run(*command.split(), "--url", url, heavy={"fastapi", "httpx", "uvicorn"})
    assert process.returncode == 1
    assert process.stderr == f"paceline: no gateway answers at {url}; `paceline up` starts one.\n"


NO_MODEL = "'/nowhere' is neither a folder nor the name of a Hugging Face repository."


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("gateway --port x", 2, "--port: 'x' is not a port number (0 to 65535)."),
        ("up --port 65536", 2, "--port: '65536' is not a port number (0 to 65535)."),
        ("up --host 198.51.100.1", 2, "--host: '198.51.100.1' is not an address of this machine."),
        ("gateway --host x.invalid", 2, "--host: 'x.invalid' is not an address of this machine."),
        ("up --model /nowhere", 2, f"--model: {NO_MODEL}"),
        ("up --config none", 2, "The configuration file none does not exist."),
        ("worker --port x", 2, "Invalid settings: --port: it must be a whole number."),
        ("worker --model /nowhere", 3, NO_MODEL),
        ("worker --mtp /nowhere", 3, NO_MODEL),
        ("worker --adapter /nowhere", 3, NO_MODEL),
        ("worker --spec-prefill /nowhere", 3, NO_MODEL),
    ],
)
def test_a_wrong_value_is_reported_before_the_server_is_imported(command, code, message) -> None:
    name, *arguments = command.split()
    worker = name == "worker"
    module = "workers.server.main" if worker else "gateway.cli"
    heavy = {"fastapi", "httpx", "mlx", "numpy", "redis", "uvicorn", "uvloop"}
    process = run(*arguments if worker else (name, *arguments), heavy=heavy, module=module)
    assert (process.returncode, process.stdout) == (code, "")
    title = "paceline worker" if worker else "paceline"
    assert process.stderr.removesuffix(f" See `paceline {name} --help`.\n").strip() == (
        f"{title}: {message}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stauts", "There is no command 'stauts'; did you mean 'status'? See `paceline --help`."),
        ("xyz", "There is no command 'xyz'. See `paceline --help`."),
        ("keys lst", "There is no command 'lst'; did you mean 'list'? See `paceline keys --help`."),
        ("bench --mdoel m", "There is no option '--mdoel'; did you mean '--model'?"),
        ("status --colour", "There is no option '--colour'. See `paceline status --help`."),
        ("keys create", "NAME is missing. See `paceline keys create --help`."),
        ("keys create a b", "unexpected argument 'b'."),
        ("keys create a --priority high", "--priority: 'high' is not one of 'interactive', "),
        ("keys create a --limit tokens_a_day=x", "--limit: 'x' is not a whole number."),
        ("keys create a --limit 60", "--limit: must be like requests_a_minute=60."),
        ("up --config=", "--config: the value is empty."),
        ("up --model=", "--model: '' is neither a folder nor the name of a Hugging Face"),
        ("gateway --host=", "--host: the value is empty."),
        ("ask hi --image=", "--image: the value is empty."),
        ("policy show --version new", "--version: 'new' is not a whole number."),
        ("policy apply file", "--note is missing."),
        ("status --url", "--url needs a value."),
        ("status --json=yes", "--json takes no value."),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(arguments, message, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.startswith(f"paceline: {message}")
    assert error.endswith(" --help`.\n")
    assert error.count("\n") == 1


def test_the_shell_completes_commands_options_and_values() -> None:
    assert "complete -o nosort" in run("completion", "bash").stdout
    prefixes = [f"--prefix-cache-{one}" for one in ("bytes", "gb")]
    for words, expected in (
        ("paceline sta", ["status"]),
        ("paceline keys re", ["revoke"]),
        ("paceline keys create --priority b", ["bulk"]),
        ("paceline worker --prefix-cache-", prefixes),
    ):
        place = str(words.count(" "))
        completed = run(_PACELINE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=place)
        assert completed.stdout.split() == [f"plain,{word}" for word in expected]


def test_the_priorities_of_a_key_are_those_of_the_policy() -> None:
    (option,) = (one for one in COMMANDS["keys", "create"].params if one.name == "priority")
    assert isinstance(option.type, click.Choice)
    assert list(option.type.choices) == [str(one) for one in Priority]


def test_each_setting_of_a_worker_has_one_flag_that_names_its_default() -> None:
    flags = {option.name: option for option in worker_command(print).params}
    settings = WorkerSettings.model_fields
    assert flags.keys() == settings.keys() - {"nodes_key", "state_dir"} | {"config"}
    for name, option in flags.items():
        assert isinstance(option, click.Option)
        default = settings[name].default if name in settings else None
        if default and name != "lanes":
            spelled = f"{default:g}" if isinstance(default, float) else default
            assert f"(default: {spelled}" in (option.help or ""), name
