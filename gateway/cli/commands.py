"""Every command of `paceline`, with its arguments and options.

A command imports its module when it runs: help, completion and usage errors import click alone.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from gateway.loadgen import json_object
from paceline.command_line import COMPLETION_VARIABLE, CONTEXT, Command, seconds_from

if TYPE_CHECKING:
    from gateway.config.settings import Settings

PROGRAM = "paceline"
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
Function = TypeVar("Function", bound=Callable[..., int])


class _Group(click.Group):
    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands in the order of this file."""
        return list(self.commands)


def _run(module: str, function: str, given: dict[str, Any]) -> int:
    """Import the module of a command and call its function."""
    from paceline.terminal import configure_logging  # noqa: PLC0415  # not for help

    configure_logging(logging.WARNING, "%(asctime)s %(levelname)s %(name)s %(message)s")
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


def _svg_file(text: str) -> Path:
    if Path(text).suffix != ".svg":
        raise click.BadParameter("the plot is an SVG file: use a name that ends in .svg")
    return _output_file(text)


_url = click.option(
    "--url",
    default="",
    metavar="URL",
    help="The gateway (default: the one of the settings, else http://127.0.0.1:8000).",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print the gateway's response.")
_policy_file = click.argument(
    "file",
    type=click.Path(),
    metavar="FILE",
    help="YAML, or JSON as .json; '-' reads YAML from standard input.",
)
_author = click.option("--author", help="The author (default: this user and this machine).")


def _serving(function: Function) -> Function:
    """Add the options that `gateway` and `up` share; the settings check their values."""
    for option in (
        click.option("--token", help="Secret that workers join with (default: a stored one)."),
        click.option(
            "--config",
            type=click.Path(),
            metavar="FILE",
            help="Settings file (default: paceline.yaml).",
        ),
        click.option("--port", metavar="N", help="Port; 0 takes a free one (default: 8000)."),
        click.option(
            "--host", metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1)."
        ),
    ):
        function = option(function)
    return function


def _read_settings(given: Mapping[str, str | None]) -> Settings:
    """Read the settings of a gateway before its import; raise `StartupError` if one is invalid."""
    from gateway.config.settings import load_settings  # noqa: PLC0415  # pydantic: not for help

    config = Path(given["config"]) if given["config"] else None
    token = given["token"] or None
    return load_settings(config, host=given["host"], port=given["port"], join_token=token)


@click.group(PROGRAM, cls=_Group, context_settings={**CONTEXT})
@click.version_option(
    package_name="paceline",
    prog_name=PROGRAM,
    message="%(prog)s %(version)s",
    help="Print the version.",
)
def paceline() -> None:
    """One OpenAI-compatible endpoint over all of a team's Macs."""


@paceline.command()
@_serving
@click.option("--model", help="Folder or Hugging Face name of an MLX model (default: a toy model).")
def up(model: str | None, **given: str | None) -> int:
    """Run the gateway and one worker: an endpoint in one command."""
    settings = _read_settings(given)
    click.echo("Starting the gateway ...")  # to import it takes some seconds
    return _run("up", "run", {"settings": settings, "model": model, "config": given["config"]})


@paceline.command()
@click.argument(
    "question",
    required=False,
    metavar="[QUESTION]",
    help="Its text; without it, or for '-', the command reads standard input.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="A picture to send along; repeatable.",
)
@click.option("--model", help="Default: a model that the gateway serves.")
@click.option("--system", metavar="TEXT", help="Instructions for the model.")
@click.option(
    "--temperature",
    type=_temperature,
    default="0",
    metavar="X",
    help="0 to 2 (default: 0, always the likeliest token, which the model can draft ahead).",
)
@click.option(
    "--max-tokens", type=_number(int), metavar="N", help="End the answer after so many tokens."
)
@_url
def ask(**given: Any) -> int:
    """Ask one question, and print the answer as it arrives.

    On a terminal a last line shows where it ran and why, how fast, and the share of drafted tokens
    that the model accepted.
    """
    return _run("ask", "run", given)


@paceline.command()
@_url
@click.option("--json", "as_json", is_flag=True, help="Print /v1/status unchanged.")
@click.option(
    "--watch",
    type=seconds_from(0.1),
    is_flag=False,
    flag_value=2.0,
    metavar="[SECONDS]",
    help="Repeat until Ctrl-C (default: every 2 s).",
)
def status(**given: Any) -> int:
    """Show lanes, workers and draft acceptance."""
    return _run("status", "run", given)


@paceline.command()
@click.argument(
    "request",
    type=click.Path(),
    metavar="REQUEST.json",
    help="Body of a request; '-' reads standard input.",
)
@_url
@_as_json
def explain(**given: Any) -> int:
    """Show where a request would be routed, and why."""
    return _run("explain", "run", given)


@paceline.command()
@_url
@_as_json
def errors(**given: Any) -> int:
    """Show the last requests that failed: of all keys with the admin key, else of your own."""
    return _run("errors", "run", given)


@paceline.group()
def keys() -> None:
    """Create, list and revoke API keys, and show their usage."""


@keys.command("create")
@click.argument("name", help="Its owner.")
@click.option("--team", help="Usage is summed by team.")
@click.option("--model", "models", multiple=True, help="Allow only this model; repeatable.")
@click.option("--pool", "pools", multiple=True, help="Allow only this pool; repeatable.")
@click.option(
    "--priority",
    type=click.Choice(["interactive", "default", "bulk"]),
    help="The highest priority allowed.",
)
@click.option("--requests-a-minute", type=_whole_number, metavar="N")
@click.option("--tokens-a-minute", type=_whole_number, metavar="N")
@click.option("--concurrent-requests", type=_whole_number, metavar="N")
@click.option("--tokens-a-day", type=_whole_number, metavar="N")
@click.option(
    "--expires-in",
    "expires_at",
    type=_expiry,
    metavar="TIME",
    help="90m, 12h or 30d (default: never).",
)
@click.option("--yes", is_flag=True, help="Create the first key without a confirmation.")
@_url
@_as_json
def create_key(**given: Any) -> int:
    """Create a key; its secret is shown only once."""
    return _run("keys", "create", given)


@keys.command("list")
@_url
@_as_json
def list_keys(**given: Any) -> int:
    """List all keys, without their secrets."""
    return _run("keys", "list_all", given)


@keys.command("revoke")
@click.argument("key_id", metavar="ID", help="The id that `paceline keys list` shows.")
@_url
@_as_json
def revoke_key(**given: Any) -> int:
    """Revoke a key, and end its running requests."""
    return _run("keys", "revoke", given)


@keys.command("usage")
@click.option("--from", "first", metavar="DAY", help="Like 2026-11-01.")
@click.option("--to", "last", metavar="DAY", help="Like 2026-11-30 (default: today).")
@_url
@_as_json
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def key_usage(as_json: bool, as_csv: bool, **given: Any) -> int:
    """Show the usage of keys by day (UTC)."""
    if as_json and as_csv:
        raise click.UsageError("--json is not allowed with --csv.")
    return _run("keys", "usage", {**given, "as_json": as_json, "as_csv": as_csv})


@paceline.command("join-engine")
@click.argument("engine_url", metavar="URL", help="Its address, such as http://127.0.0.1:1234.")
@click.option(
    "--kind",
    type=click.Choice(
        [
            *("auto", "vllm-mlx", "mlx-vlm", "mlx-lm", "omlx", "lmstudio", "ollama", "llama.cpp"),
            *("paceline", "openai"),
        ]
    ),
    default="auto",
    help="Default: auto, the gateway asks the engine.",
)
@click.option("--id", "engine_id", metavar="ID", help="Default: made of its address.")
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME[=ENGINE_NAME]",
    help="Serve this model, by another name for clients if two are given; repeatable "
    "(default: all that it lists).",
)
@click.option("--pool", "pools", multiple=True, help="Repeatable (default: those of its kind).")
@click.option("--label", "labels", multiple=True, help="For pools of the policy; repeatable.")
@click.option(
    "--slots",
    type=_whole_number,
    metavar="N",
    help="Requests at a time (default: what it tells, or a number of its kind).",
)
@click.option(
    "--api-key-env",
    metavar="NAME",
    help="The variable, at the gateway, that holds its API key; it ends in _API_KEY.",
)
@click.option("--cache-salt", is_flag=True, help="It isolates clients by vLLM's field cache_salt.")
@_url
@_as_json
def join_engine(**given: Any) -> int:
    """Add a running LM Studio, Ollama, mlx-lm, mlx-vlm, vllm-mlx, oMLX or llama.cpp.

    The gateway asks it for its kind and its models, and sends it requests from then on.
    """
    return _run("engines", "join", given)


@paceline.group()
def engines() -> None:
    """List and remove the engines of other kinds."""


@engines.command("list")
@_url
@_as_json
def list_engines(**given: Any) -> int:
    """List those of the settings and those that were joined."""
    return _run("engines", "list_all", given)


@engines.command("remove")
@click.argument("engine_id", metavar="ID", help="The id that `paceline engines list` shows.")
@_url
def remove_engine(**given: Any) -> int:
    """Remove an engine that was joined; its running requests continue."""
    return _run("engines", "remove", given)


@paceline.group("prefix-cache")
def prefix_cache() -> None:
    """Delete the conversations that workers have cached."""


@prefix_cache.command("clear")
@click.argument("workers", nargs=-1, metavar="[WORKER]...", help="Their ids (default: all).")
@_url
def clear_prefix_cache(**given: Any) -> int:
    """Empty the prefix caches of workers, in memory and on disk."""
    return _run("prefix_cache", "clear", given)


@paceline.group()
def policy() -> None:
    """Show and change the policy of a running gateway."""


@policy.command("show")
@click.option("--version", type=_whole_number, metavar="N", help="Print this version.")
@_url
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show_policy(**given: Any) -> int:
    """Print the active policy, or an earlier version."""
    return _run("policy", "show", given)


@policy.command("validate")
@_policy_file
@click.option("--offline", is_flag=True, help="Check it without a gateway.")
@_url
def validate_policy(**given: Any) -> int:
    """Check whether a policy is valid."""
    return _run("policy", "validate", given)


@policy.command("diff")
@_policy_file
@_url
def compare_policy(**given: Any) -> int:
    """Show what a policy would change, and which requests it would move."""
    return _run("policy", "diff", given)


@policy.command("apply")
@_policy_file
@click.option("--note", required=True, help="The purpose; it is stored with the version.")
@_author
@_url
def apply_policy(**given: Any) -> int:
    """Activate a policy."""
    return _run("policy", "apply", given)


@policy.command("history")
@_url
def policy_history(**given: Any) -> int:
    """List the versions of the policy, the newest first."""
    return _run("policy", "history", given)


@policy.command("rollback")
@click.argument("version", type=_whole_number, metavar="VERSION")
@click.option("--note", default="", help="The purpose; it is stored with the version.")
@_author
@_url
def roll_policy_back(**given: Any) -> int:
    """Activate an earlier version again."""
    return _run("policy", "rollback", given)


@paceline.command()
@_serving
def gateway(**given: str | None) -> int:
    """Run the gateway alone.

    Workers join it, or paceline.yaml lists them.
    """
    return _run("gateway", "run", {"settings": _read_settings(given)})


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
        os.execv(sys.executable, [sys.executable, "-m", self._module, *arguments])  # noqa: S606

    def shell_complete(self, ctx: click.Context, incomplete: str) -> NoReturn:  # noqa: ARG002
        self.invoke(ctx)


for _name, _module, _help in (
    ("worker", "workers", "Serve a model on this machine."),
    ("doctor", "workers.doctor", "Measure this Mac, and say what to run on it."),
):
    paceline.add_command(_EngineCommand(_name, _module, _help))


@paceline.command()
@_url
@click.option("--model", default="", help="Default: the first model of the endpoint.")
@click.option(
    "--compare",
    metavar="URL",
    default="",
    help="A second endpoint, measured in alternation; its key is in PACELINE_COMPARE_API_KEY.",
)
@click.option(
    "--compare-model", default="", help="Default: the same model if the endpoint serves it."
)
@click.option(
    "--concurrency",
    type=_numbers(int),
    metavar="N,N,...",
    help="Levels of concurrent requests, one after another (default: 1).",
)
@click.option(
    "--rate",
    type=_numbers(float),
    metavar="R,R,...",
    help="Levels of requests per second instead; latencies count from the time at which each "
    "request is due.",
)
@click.option(
    "--requests",
    type=_number(int),
    metavar="N",
    help="Requests per measurement (default: at least 16).",
)
@click.option(
    "--prompts",
    type=Path,
    metavar="FILE.jsonl",
    help="JSON lines with 'prompt' or 'messages'.",
)
@click.option("--max-tokens", type=_number(int), default="256", metavar="N", help="Default: 256.")
@click.option(
    "--temperature", type=float, default=0.0, metavar="T", help="Default: 0, which is greedy."
)
@click.option(
    "--body",
    type=_json_object,
    default="{}",
    metavar="JSON",
    help="Further fields of every request.",
)
@click.option(
    "--compare-body",
    type=_json_object,
    metavar="JSON",
    help="""For the second endpoint, like '{"draft_tokens": 0}' (default: --body).""",
)
@click.option(
    "--seed",
    type=_whole_number,
    default="0",
    metavar="N",
    help="Selects prompts and arrival times.",
)
@click.option(
    "--repeat",
    type=_number(int),
    metavar="N",
    help="Repetitions (default: 1; 2 in a comparison).",
)
@click.option(
    "--json",
    "json_file",
    type=_output_file,
    metavar="FILE",
    help="Write all figures, under the names of vLLM.",
)
@click.option(
    "--plot", type=_svg_file, metavar="FILE.svg", help="Plot the figures by level of load."
)
def bench(**given: Any) -> int:
    """Measure any OpenAI endpoint: first token, throughput, drafts."""
    if given["rate"] and given["concurrency"]:
        raise click.UsageError("--rate is not allowed with --concurrency.")
    return _run("bench", "run", given)


@paceline.command(
    epilog="""For zsh, the shell of macOS, add this line to ~/.zshrc:

    \b
      eval "$(paceline completion zsh)"
    """
)
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
def completion(shell: str) -> int:
    """Print a script that completes commands and options."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # seldom needed

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(paceline, {}, PROGRAM, COMPLETION_VARIABLE).source())
    return 0
