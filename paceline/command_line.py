"""Command lines: the flags of a worker, and wrong usage in plain words; imports click alone."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click

CONTEXT: Mapping[str, Any] = {"help_option_names": ("-h", "--help"), "max_content_width": 100}


class Command(click.Command):
    """A command whose errors name it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; raise `UsageError` for a surplus one too."""
        ctx.allow_extra_args = True
        try:
            surplus = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        if surplus and not ctx.resilient_parsing:
            raise click.UsageError(f"'{surplus[0]}' is one argument too many.", ctx)
        return surplus


def worker_command(run: Callable[..., int] | None = None) -> Command:
    """Return the command of a worker, with a flag for each setting.

    The flags are text, and None if absent: `WorkerSettings` alone checks the values, wherever they
    come from.
    """

    def text(flag: str, help_text: str, metavar: str = "TEXT") -> click.Option:
        return click.Option([flag], metavar=metavar, help=help_text)

    return Command(
        "worker",
        callback=run,
        context_settings={**CONTEXT},
        help="Serve a model on this machine: text with speculative decoding, and images if the "
        "model supports them.",
        short_help="Serve a model on this machine.",
        params=[
            text("--model", "Folder or Hugging Face name of an MLX model (default: a toy model)."),
            text(
                "--task",
                "generate, embeddings or rerank (default: what the folder of the model tells).",
                "TASK",
            ),
            text("--lanes", "Comma-separated lanes (default: text-mtp,vlm)."),
            text(
                "--host",
                "Address to listen on (default: loopback; with --join all addresses).",
                "ADDRESS",
            ),
            text("--port", "Port to listen on; 0 takes a free one (default: 9200).", "N"),
            text("--join", "Gateway that receives the heartbeats of this worker.", "URL"),
            text("--token", "Join token of the gateway; PACELINE_JOIN_TOKEN hides it from `ps`."),
            text("--id", "Name of this worker (default: host name and port)."),
            click.Option(
                ["--label", "labels"],
                multiple=True,
                help="Label for the pools of the policy; repeatable.",
            ),
            text(
                "--adapter", "Folder or Hugging Face name of a LoRA adapter of that model.", "MODEL"
            ),
            text(
                "--dtype",
                "float16, bfloat16, float32, or auto: float16 on M1 and M2 (default: as stored).",
                "TYPE",
            ),
            text(
                "--context",
                "Limit of prompt and answer (default: what the model was trained for).",
                "TOKENS",
            ),
            text("--rows", "Requests that decode together in a lane, 1 to 64 (default: 8).", "N"),
            text("--prefill-chunk", "Tokens of a prompt in one pass (default: 1024).", "TOKENS"),
            text("--draft-tokens", "Draft tokens per step, 0 to 8 (default: 2).", "N"),
            text("--mtp", "Folder or Hugging Face name of an MTP head for the model.", "HEAD"),
            text(
                "--prefix-cache-dir",
                "Store the prefix cache there across restarts (default: in the state folder).",
                "FOLDER",
            ),
            text(
                "--prefix-cache-bytes",
                "Memory of the prefix cache (default: a quarter of what is free for requests).",
                "N",
            ),
            text("--kv-bits", "Bits of what the prefix cache keeps, 8 or 16 (default: 16).", "N"),
            text("--prefix-cache-gb", "Disk of the prefix cache (default: 20; 0: none).", "GB"),
            text("--spec-prefill", "Small model that selects the tokens of long prompts.", "MODEL"),
            text("--spec-prefill-threshold", "Shortest long prompt (default: 8192).", "TOKENS"),
            text("--spec-prefill-keep", "Share of tokens to prefill (default: 0.3).", "SHARE"),
            text("--group", "Host file of the machines that serve the model together.", "FILE"),
            text(
                "--backend", "ring (TCP) or jaccl (RDMA) between them (default: ring).", "BACKEND"
            ),
            text(
                "--split",
                "tensor or pipeline: how they divide the model (default: tensor if it can).",
                "SPLIT",
            ),
            click.Option(
                ["--config"],
                type=click.Path(),
                metavar="FILE",
                help="Settings file (default: paceline.yaml).",
            ),
            click.Option(["--leash"], is_flag=True, help="Shut down when standard input closes."),
        ],
    )


_LONGEST_S = 3600


def seconds_from(lowest_s: float) -> Callable[[str], float]:
    """Return a parser of a time limit between this and an hour."""

    def parse(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not lowest_s <= seconds <= _LONGEST_S:
            raise click.BadParameter(
                f"'{text}' is not a time between {lowest_s:g} and {_LONGEST_S} seconds"
            )
        return seconds

    return parse


def doctor_command(run: Callable[..., int] | None = None) -> Command:
    """Return the command that measures this machine."""
    return Command(
        "doctor",
        callback=run,
        context_settings={**CONTEXT},
        help="Measure what a model does on this Mac, and say what to run: rounds by draft length "
        "and number of requests, reading, memory, and whether answers stay the same.\n\n"
        "Nothing else should run meanwhile. A report for people goes to the terminal, and one to "
        "send in to a file.",
        short_help="Measure this Mac, and say what to run on it.",
        params=[
            click.Option(
                ["--model"],
                default="",
                help="Folder or Hugging Face name of an MLX model (default: a toy model).",
            ),
            click.Option(
                ["--mtp"],
                default="",
                metavar="HEAD",
                help="Folder or Hugging Face name of an MTP head for the model.",
            ),
            click.Option(
                ["--json", "json_file"],
                type=click.Path(dir_okay=False, writable=True, path_type=Path),
                default="paceline-doctor.json",
                metavar="FILE",
                help="The report to send in (default: paceline-doctor.json).",
            ),
            click.Option(
                ["--seconds"],
                type=seconds_from(1),
                default="120",
                metavar="N",
                help="Limit of the measurements, after the model is loaded (default: 120).",
            ),
        ],
    )


def describe_usage_error(error: click.UsageError) -> str:
    """Return what is wrong with a command line, and which command shows the right one."""
    match error:
        case click.NoSuchCommand(command_name=name, possibilities=known):
            problem = f"There is no command '{name}'{_meant(name, known)}"
        case click.NoSuchOption(option_name=name, possibilities=known):
            problem = f"There is no option '{name}'{_meant(name, known)}"
        case click.MissingParameter(param=click.Parameter() as parameter):
            problem = f"{_name(parameter)} is missing."
        case click.BadParameter(param=click.Parameter() as parameter):
            problem = f"{_name(parameter)}: {error.message.removesuffix('.')}."
        case click.BadOptionUsage(ctx=click.Context() as context, option_name=name):
            problem = f"{name} {'takes no' if _is_flag(context, name) else 'needs a'} value."
        case _:
            problem = error.message
    return f"{problem} See `{error.ctx.command_path} --help`." if error.ctx else problem


def _meant(name: str, known: Iterable[str] | None) -> str:
    """Return the end of a sentence on an unknown name: the known one that looks most like it."""
    # Without the dashes, which make all options alike.
    by_word = {one.lstrip("-"): one for one in known or ()}
    close = difflib.get_close_matches(name.lstrip("-"), by_word, 1)
    return f"; did you mean '{by_word[close[0]]}'?" if close else "."


def _name(parameter: click.Parameter) -> str:
    """Return a parameter as the user writes it."""
    is_option = isinstance(parameter, click.Option)
    return max(parameter.opts, key=len) if is_option else parameter.human_readable_name


def _is_flag(context: click.Context, name: str) -> bool:
    return any(
        isinstance(option, click.Option) and option.is_flag and name in option.opts
        for option in context.command.params
    )
