"""Show where a request would be routed, and why, without running it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gateway.cli.client import add_gateway_url, call_gateway, print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    parser.add_argument(
        "request", metavar="REQUEST.json", help="the body of a request ('-' reads standard input)"
    )
    add_gateway_url(parser)


def run(options: argparse.Namespace) -> int:
    """Print the gateway's decision as JSON."""
    try:
        text = sys.stdin.read() if options.request == "-" else Path(options.request).read_text()
        body = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"paceline: cannot read {options.request}: {error}")
    except json.JSONDecodeError as error:
        sys.exit(f"paceline: {options.request} is not JSON: {error}")
    print_json(call_gateway(options.url, "POST", "/v1/route/explain", body))
    return 0
