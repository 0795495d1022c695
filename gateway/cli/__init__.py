"""The command `paceline`: each subcommand is a module, imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from workers.terminal import configure_logging, printable

# The help texts are here, not in the modules, so that `paceline --help` imports none of them.
COMMANDS = {
    "up": "run the gateway and one worker: a working endpoint in one command",
    "gateway": "run the gateway alone",
    "status": "show lanes, workers and draft acceptance",
    "policy": "show and change the policy of a running gateway",
    "explain": "show where a request would be routed, and why",
    "keys": "create, list and revoke API keys, and show their usage",
    "bench": "measure any OpenAI endpoint: first token, throughput, draft acceptance",
    "worker": "serve a model on this machine (`paceline worker --help` lists its options)",
}


class CommandError(Exception):
    """A command cannot go on; the message is one sentence for a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    configure_logging(logging.WARNING, "%(asctime)s %(levelname)s %(name)s %(message)s")
    if arguments[:1] == ["worker"]:
        # A process of its own: the gateway's code and an engine's never share one.
        os.execv(sys.executable, [sys.executable, "-m", "workers", *arguments[1:]])  # noqa: S606
    try:
        options = _parser(chosen=arguments[0] if arguments else "").parse_args(arguments)
        exit_code: int = options.run(options)
        sys.stdout.flush()
        return exit_code
    except CommandError as error:
        sys.exit(printable(f"paceline: {error}"))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        from gateway.errors import StartupError  # noqa: PLC0415  # loads pydantic: not for `--help`

        if not isinstance(error, StartupError):
            raise
        sys.stderr.write(printable(f"paceline: {error}\n"))
        return 2


def _parser(chosen: str) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the options of the chosen one alone."""
    parser = argparse.ArgumentParser(
        prog="paceline", description="One OpenAI-compatible endpoint over all of a team's Macs."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if name != chosen:
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(f"gateway.cli.{name}")
        subparser = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_options(subparser)
    return parser
