"""Every command of `paceline`, with its arguments and options.

A command imports its module when it runs: help, completion and usage errors import only click.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gateway.loadgen import json_object
from paceline.command_line import COMPLETION_VARIABLE, CONTEXT, Command, is_own, model_problem

if TYPE_CHECKING:
    from gateway.config.settings import Settings

PROGRAM = "paceline"
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_ENGINES = "auto vllm-mlx mlx-vlm mlx-lm omlx lmstudio ollama llama.cpp paceline openai".split()


class _Group(click.Group):
    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands in the order of this file."""
        return list(self.commands)


def _run(module: str, function: str, **given: Any) -> int:
    """Import the module of a command and call its function."""
    from paceline.terminal import configure_logging  # noqa: PLC0415  # not for help

    configure_logging(logging.WARNING, "%(asctime)s %(levelname)s %(name)s %(message)s")
    if module in ("up", "gateway"):  # what comes, goes and is edited is told, too
        logging.getLogger("gateway").setLevel(logging.INFO)
    command = getattr(importlib.import_module(f"gateway.cli.{module}"), function)
    exit_code: int = command(**given)
    return exit_code


def _number(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if not 0 < number < float("inf"):
            raise click.BadParameter(f"'{text}' is not a number above 0")
        return number

    return parse


def _numbers(kind: type[int] | type[float]) -> Callable[[str], tuple[float, ...]]:
    parse = _number(kind)
    return lambda text: tuple(parse(part) for part in text.split(","))


def _temperature(text: str) -> float:
    try:
        temperature = float(text)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 2:
        raise click.BadParameter(f"'{text}' is not a number between 0 and 2")
    return temperature


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"'{text}' is not a whole number") from None


def _port(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and int(text[:6]) <= 65535):
        raise click.BadParameter(f"'{text}' is not a port number (0 to 65535)")
    return text


def _host(text: str) -> str:
    if not is_own(text):
        raise click.BadParameter(f"'{text}' is not an address of this machine")
    return text


def _model(text: str) -> str:
    if problem := model_problem(text):
        raise click.BadParameter(problem)
    return text


def _limit(text: str) -> tuple[str, int]:
    name, given, number = text.partition("=")
    if not given:
        raise click.BadParameter("must be like requests_a_minute=60")
    return name, _whole_number(number)


def _expiry(text: str) -> str:
    """Return the time at which a duration from now ends."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if match is None:
        raise click.BadParameter("must be like 90m, 12h or 30d")
    return (datetime.now(UTC) + timedelta(**{_UNITS[match[2]]: int(match[1])})).isoformat()


def _json_object(text: str) -> dict[str, Any]:
    if (value := json_object(text)) is None:
        raise click.BadParameter("must be a JSON object")
    return value


def _output_file(text: str) -> Path:
    """Return a writable file; checking first avoids losing the results of a long measurement."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise click.BadParameter(f"{file} cannot be written")
    return file


def _option(names: str, text: str, metavar: str | None = None, **rest: Any) -> click.Option:
    """Return an option; `names` is its flag, and its name in Python if that is another."""
    return click.Option(names.split(), help=text, metavar=metavar, **rest)


def _argument(name: str, text: str, metavar: str | None = None, **rest: Any) -> click.Argument:
    return click.Argument([name], help=text, metavar=metavar, **rest)


_URL = _option(
    "--url", "The gateway (default: the one in the settings, else http://127.0.0.1:8000).", "URL"
)
_AS_JSON = _option("--json as_json", "Print the gateway's response.", is_flag=True)
_FILE = _argument("file", "YAML, or JSON as .json; '-' reads YAML from standard input.", "FILE")
_NOTE = "The purpose; it is stored with the version."
# Checked here, since the import of the gateway takes seconds; the settings check all sources.
_SERVING = (
    _option("--host", "Address to listen on (default: 127.0.0.1).", "ADDRESS", type=_host),
    _option("--port", "Port; 0 picks a free one (default: 8000).", "N", type=_port),
    _option("--config", "Settings file (default: paceline.yaml).", "FILE", type=click.Path()),
)


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from paceline.installation import describe_version  # noqa: PLC0415  # seldom needed

        click.echo(f"{PROGRAM} {describe_version()}")
        ctx.exit()


@click.group(PROGRAM, cls=_Group, context_settings={**CONTEXT})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and its commit.",
)
def paceline() -> None:
    """One OpenAI-compatible endpoint over all of a team's Macs."""


_GROUPS = {
    name: _Group(name, help=text)
    for name, text in (
        ("keys", "Create, change, list and revoke API keys, and show their usage."),
        ("workers", "List workers, and stop or resume requests to them."),
        ("engines", "List and remove the engines of other kinds."),
        ("service", "Run Paceline as a service, without a terminal."),
        ("prefix-cache", "Delete the conversations that workers have cached."),
        ("policy", "Show and change the policy of a running gateway."),
    )
}


def _add(
    path: str, text: str, *params: click.Parameter, run: Callable[..., int] | None = None
) -> None:
    """Add a command; without `run` it runs the function of its name in the module of its group."""
    group, _, name = path.rpartition(" ")
    function = "run" if not group else "list_all" if name == "list" else name
    run = run or functools.partial(_run, (group or name).replace("-", "_"), function)
    within: click.Group = paceline
    if group:
        within = _GROUPS[group]
        paceline.add_command(within)
    within.add_command(Command(name, callback=run, help=text, params=[*params]))


def _read_settings(given: Mapping[str, str | None]) -> Settings:
    """Read the settings of a gateway before its import; raise `StartupError` if one is invalid."""
    # pydantic: not for help
    from gateway.config.settings import Settings, load_settings  # noqa: PLC0415
    from paceline.settings import unknown_variables  # noqa: PLC0415

    config = Path(given["config"]) if given["config"] else None
    settings = load_settings(config, host=given["host"], port=given["port"])
    for warning in unknown_variables(Settings):
        click.echo(f"{PROGRAM}: {warning}", err=True)
    return settings


def _up(model: str | None, **given: str | None) -> int:
    from gateway.errors import StartupError  # noqa: PLC0415  # not for help
    from paceline.installation import missing_worker  # noqa: PLC0415

    settings = _read_settings(given)
    if lack := missing_worker():
        raise StartupError(lack)
    click.echo("Starting the gateway ...")  # to import it takes some seconds
    return _run("up", "run", settings=settings, model=model, config=given["config"])


def _gateway(**given: str | None) -> int:
    return _run("gateway", "run", settings=_read_settings(given))


class _EngineCommand(click.Command):
    """A command of another process, which replaces this one: MLX and the gateway never share one.

    That process parses the arguments, prints the help and completes.
    """

    def __init__(self, name: str, module: str, help_text: str) -> None:
        super().__init__(name, help=help_text, add_help_option=False)
        self._module = module

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:  # noqa: ARG002
        return args

    def invoke(self, ctx: click.Context) -> NoReturn:
        arguments = [] if ctx.obj is None else ctx.obj[1:]
        os.execv(sys.executable, [sys.executable, "-P", "-m", self._module, *arguments])  # noqa: S606

    def shell_complete(self, ctx: click.Context, incomplete: str) -> NoReturn:  # noqa: ARG002
        self.invoke(ctx)


def _completion(shell: str) -> int:
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # seldom needed

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(paceline, {}, PROGRAM, COMPLETION_VARIABLE).source())
    return 0


_add(
    "up",
    "Run a gateway and one worker: an endpoint in one command.",
    *_SERVING,
    _option(
        "--model",
        "Folder or Hugging Face name of an MLX model (default: a toy model).",
        "MODEL",
        type=_model,
    ),
    run=_up,
)
_add(
    "ask",
    "Ask one question, and print the answer as it arrives.\n\nOn a terminal, the last line shows "
    "where it ran and why, its speed, and the share of drafted tokens that were accepted.",
    _argument(
        "question",
        "The question; without it, or for '-', the command reads standard input.",
        "[QUESTION]",
        required=False,
    ),
    _option(
        "--image images",
        "A picture to send with it; repeatable.",
        "FILE",
        multiple=True,
        type=click.Path(),
    ),
    _option("--model", "Default: a model that the gateway serves."),
    _option(
        "--temperature",
        "0 to 2 (default: 0, which always picks the likeliest token and allows drafts).",
        "X",
        type=_temperature,
        default="0",
    ),
    _URL,
)
_add(
    "status",
    "Show lanes, workers and draft acceptance.",
    _URL,
    _option("--json as_json", "Print /v1/status unchanged.", is_flag=True),
)
_add(
    "explain",
    "Show where the gateway would route a request, and why.",
    _argument("request", "Body of a request; '-' reads standard input.", "REQUEST.json"),
    _URL,
    _AS_JSON,
)
_add(
    "errors",
    "Show the last failed requests: for all keys with the admin key, else for your own.",
    _URL,
    _AS_JSON,
)

_LIMITS = ("requests_a_minute", "tokens_a_minute", "concurrent_requests", "tokens_a_day")
_TERMS = (
    _option("--team", "Usage is reported by team."),
    _option("--model models", "Allow only this model; repeatable.", multiple=True),
    _option("--pool pools", "Allow only this pool; repeatable.", multiple=True),
    _option(
        "--priority",
        "The highest allowed priority.",
        type=click.Choice(["interactive", "default", "bulk"]),
    ),
    _option(
        "--limit limits",
        f"{', '.join(_LIMITS[:-1])} or {_LIMITS[-1]}; repeatable.",
        "NAME=N",
        multiple=True,
        type=_limit,
    ),
    _option("--expires-in expires_at", "90m, 12h or 30d (default: never).", "TIME", type=_expiry),
)
_KEY = _argument("key", "Its name, or the id that `paceline keys list` shows.", "NAME")
_add(
    "keys create",
    "Create a key; its secret is shown only once.",
    _argument("name", "Its owner."),
    *_TERMS,
    _option("--yes", "Create the first key without a question.", is_flag=True),
    _URL,
    _AS_JSON,
)
_add("keys list", "List all keys, without their secrets.", _URL, _AS_JSON)
_add(
    "keys edit",
    "Change the given properties of a key.",
    _KEY,
    _option("--name", "A new name."),
    *_TERMS,
    _option(
        "--clear",
        "Reset this to its default; repeatable.",
        multiple=True,
        type=click.Choice(["team", "models", "pools", "priority", "expires_at", *_LIMITS]),
    ),
    _URL,
)
_add("keys rotate", "Replace the secret of a key, and refuse the old one.", _KEY, _URL, _AS_JSON)
_add("keys revoke", "Revoke a key permanently, and end its running requests.", _KEY, _URL)
_add(
    "keys usage",
    "Show the usage of keys by day (UTC).",
    _option("--from first", "Like 2026-11-01.", "DAY"),
    _option("--to last", "Like 2026-11-30 (default: today).", "DAY"),
    _URL,
    _option("--csv as_csv", "Print CSV.", is_flag=True),
    _AS_JSON,
)

_WORKER = _argument("worker", "The id that `paceline workers list` shows.", "WORKER")
_JOIN = """Join a gateway with this machine, and serve.

Without an address, the command lists the gateways that announce themselves on the local network. It
asks for the code that `paceline workers pair` or the Workers page of the gateway shows. Options of
`paceline worker` can follow."""
_ADDRESS = "Like http://192.168.1.10:8000, then options of the worker."
_ID = _option("--id worker_id", "Name of the worker (default: that of this machine).", "ID")
_add(
    "join",
    _JOIN,
    _argument("arguments", _ADDRESS, "[ADDRESS] [OPTIONS]", nargs=-1, type=click.UNPROCESSED),
    _ID,
)
paceline.commands["join"].context_settings = {"ignore_unknown_options": True}
_add("workers list", "List the workers, and who has cordoned them.", _URL, _AS_JSON)
_add("workers pair", "Show a code with which another Mac joins, within two minutes.", _URL)
_add("workers unpair", "End the pairing of a worker: its token opens nothing.", _WORKER, _URL)
_add("workers cordon", "Stop new requests to a worker; running ones continue.", _WORKER, _URL)
_add("workers uncordon", "Resume requests to a worker.", _WORKER, _URL)
_add(
    "workers drain",
    "Cordon a worker, and wait until its requests have ended.",
    _WORKER,
    _option(
        "--timeout timeout_s",
        "The longest wait in seconds (default: 30).",
        "N",
        type=_whole_number,
        default="30",
    ),
    _option("--move", "Continue its streams at other workers.", is_flag=True),
    _URL,
)
_add(
    "join-engine",
    "Add a running LM Studio, Ollama, mlx-lm, mlx-vlm, vllm-mlx, oMLX or llama.cpp.\n\nThe "
    "gateway detects its kind and its models, and sends it requests from then on.",
    _argument("engine_url", "Its address, such as http://127.0.0.1:1234.", "URL"),
    _option(
        "--kind",
        "Default: auto, the gateway detects it.",
        type=click.Choice(_ENGINES),
        default="auto",
    ),
    _option("--id engine_id", "Default: derived from its address.", "ID"),
    _option(
        "--model models",
        "Serve this model, under NAME for clients; repeatable (default: all models that it lists).",
        "NAME[=ENGINE_NAME]",
        multiple=True,
    ),
    _option("--pool pools", "Repeatable (default: those of its kind).", multiple=True),
    _option("--label labels", "For pools of the policy; repeatable.", multiple=True),
    _option(
        "--slots",
        "Concurrent requests (default: the number that it reports, or one for its kind).",
        "N",
        type=_whole_number,
    ),
    _option(
        "--api-key-env",
        "The gateway's environment variable with its API key; the name ends in _API_KEY.",
        "NAME",
    ),
    _option("--cache-salt", "It isolates clients by vLLM's field cache_salt.", is_flag=True),
    _URL,
    run=functools.partial(_run, "engines", "join"),
)
_add("engines list", "List the engines in the settings and those that have joined.", _URL, _AS_JSON)
_add(
    "engines remove",
    "Remove a joined engine; its running requests continue.",
    _argument("engine_id", "The id that `paceline engines list` shows.", "ID"),
    _URL,
)

_add(
    "prefix-cache clear",
    "Clear the prefix caches of workers, in memory and on disk.",
    _argument("workers", "Their ids (default: all).", "[WORKER]...", nargs=-1),
    _URL,
    run=functools.partial(_run, "workers", "clear_caches"),
)

_add(
    "policy show",
    "Print the active policy, or an earlier version.",
    _option("--version", "Print this version.", "N", type=_whole_number),
    _URL,
)
_add(
    "policy validate",
    "Check whether a policy is valid.",
    _FILE,
    _option("--offline", "Do not ask a gateway.", is_flag=True),
    _URL,
)
_add(
    "policy diff", "Show what a policy would change, and which requests it would move.", _FILE, _URL
)
_add("policy apply", "Activate a policy.", _FILE, _option("--note", _NOTE, required=True), _URL)
_add("policy history", "List the versions, newest first.", _URL, _AS_JSON)
_add(
    "policy rollback",
    "Activate an earlier version again.",
    _argument("version", "Its number.", "VERSION", type=_whole_number),
    _option("--note", _NOTE, default=""),
    _URL,
)

_add(
    "gateway",
    "Run only the gateway.\n\nWorkers join it, or you list them in paceline.yaml.",
    *_SERVING,
    run=_gateway,
)
_add(
    "service install",
    "Start the service now, at every boot or login, and after a failure.\n\nIt reads its settings "
    "only from a file: --config, else paceline.yaml here, else ~/.paceline/paceline.yaml.",
    _argument(
        "command",
        "The command to run: up (the default), gateway or worker.",
        "[COMMAND]",
        required=False,
        default="up",
        type=click.Choice(["up", "gateway", "worker"]),
    ),
    _option("--config", "Settings file.", "FILE", type=click.Path()),
    _option("--system", "For a Mac where nobody logs in; needs sudo.", is_flag=True),
)
_add("service status", "Show whether it runs, and where its log is; exit with 1 if it does not.")
_add(
    "service logs",
    "Print the end of its log.",
    _option("--lines", "Default: 100.", "N", type=_number(int), default=100),
    _option("--follow", "Keep printing new lines.", is_flag=True),
)
_add("service stop", "Let running requests finish, and stop it until `restart` or the next start.")
_add("service restart", "Let running requests finish, and restart the service.")
_add("service uninstall", "Let running requests end, and remove it; settings and logs remain.")
_add(
    "upgrade",
    "Replace this version with another one after running requests have ended, and restart the "
    "service.",
    _argument(
        "dist",
        "Folder with its install.sh (default: where this one came from, or Homebrew).",
        "[DIST]",
        required=False,
        type=click.Path(path_type=Path),
    ),
)
_BACKUP = _argument("file", "The backup.", "FILE", type=click.Path(path_type=Path))
_add("backup", "Write keys, policies, usage and secrets to a new, encrypted file.", _BACKUP)
_add(
    "restore",
    "Put a backup into the state folder of a stopped gateway.\n\nThe old files are kept.",
    _BACKUP,
    run=functools.partial(_run, "backup", "restore"),
)
for _name, _module, _help in (
    ("worker", "workers", "Serve a model on this machine."),
    ("doctor", "workers.doctor", "Measure this Mac, and recommend settings for it."),
):
    paceline.add_command(_EngineCommand(_name, _module, _help))
_add(
    "bench",
    "Measure any OpenAI endpoint: first token, throughput, drafts.",
    _URL,
    _option("--model", "Default: the first model of the endpoint.", default=""),
    _option(
        "--compare",
        "A second endpoint, measured in alternation; its key is in PACELINE_COMPARE_API_KEY.",
        "URL",
        default="",
    ),
    _option(
        "--concurrency",
        "Levels of concurrent requests, one after another (default: 1).",
        "N,N,...",
        type=_numbers(int),
    ),
    _option(
        "--rate",
        "Levels of requests per second instead; latencies count from the time when each request "
        "is due.",
        "R,R,...",
        type=_numbers(float),
    ),
    _option(
        "--requests", "Requests per measurement (default: at least 16).", "N", type=_number(int)
    ),
    _option("--prompts", "JSON lines with 'prompt' or 'messages'.", "FILE.jsonl", type=Path),
    _option("--max-tokens", "Default: 256.", "N", type=_number(int), default="256"),
    _option("--body", "Extra fields for every request.", "JSON", type=_json_object, default="{}"),
    _option(
        "--compare-body",
        """For the second endpoint, like '{"draft_tokens": 0}' (default: --body).""",
        "JSON",
        type=_json_object,
    ),
    _option("--repeat", "Repetitions (default: 1; 2 in a comparison).", "N", type=_number(int)),
    _option("--json json_file", "Write all figures under vLLM's names.", "FILE", type=_output_file),
)
_add(
    "completion",
    "Print a script that completes commands and options.\n\nFor zsh, the shell of macOS, add this "
    'line to ~/.zshrc:\n\n\b\n  eval "$(paceline completion zsh)"',
    click.Argument(["shell"], type=click.Choice(["bash", "fish", "zsh"])),
    run=_completion,
)
