"""Show where a request would be routed, and why, without running it."""

from __future__ import annotations

import argparse
import json

from gateway.cli import CommandError
from gateway.cli.client import add_gateway, print_json, read_text


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    parser.add_argument(
        "request", metavar="REQUEST.json", help="the body of a request ('-' reads standard input)"
    )
    add_gateway(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    """Print the gateway's decision as JSON."""
    try:
        body = json.loads(read_text(options.request))
    except json.JSONDecodeError as error:
        raise CommandError(f"{options.request} is not JSON: {error}") from None
    print_json(options.gateway.read("POST", "/v1/route/explain", json=body))
    return 0
