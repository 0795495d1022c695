"""`paceline explain`: where a request would go, and why, without running it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from gateway.cli.client import add_gateway_url, ask_gateway


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `explain`."""
    parser.add_argument("request", metavar="REQUEST.json", help="the request's body ('-' reads it)")
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
    decision = ask_gateway(options.url, "POST", "/v1/route/explain", body)
    sys.stdout.write(json.dumps(decision, indent=2) + "\n")
    return 0
