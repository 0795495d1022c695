"""The command `paceline`: each subcommand lives in a file of its own."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from gateway.cli import bench, explain, keys, policy, status, up, worker
from gateway.cli import gateway as serve
from gateway.errors import StartupError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["worker"]:
        worker.become_worker(arguments[1:])
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        options = _parser().parse_args(arguments)
        run: Callable[[argparse.Namespace], int] = options.run
        ended = run(options)
        sys.stdout.flush()
        return ended
    except StartupError as refused:
        sys.stderr.write(f"paceline: {refused}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline", description="One OpenAI-compatible endpoint over all of a team's Macs."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in (
        ("up", up),
        ("gateway", serve),
        ("status", status),
        ("policy", policy),
        ("explain", explain),
        ("keys", keys),
        ("bench", bench),
    ):
        subparser = commands.add_parser(name, help=command.HELP, description=command.__doc__)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    commands.add_parser("worker", help=worker.HELP)
    return parser
