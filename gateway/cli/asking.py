"""Ask a running gateway, for the commands that only look."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"


def add_gateway_url(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, the gateway to ask."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the gateway (default: %(default)s)")


def ask_gateway(url: str, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
    """Ask a running gateway for JSON; end the command with one clear sentence if it refuses.

    `PACELINE_API_KEY` is sent along when the environment has one.
    """
    key = os.environ.get("PACELINE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url + path, json=body, headers=headers, timeout=5.0)
    except httpx.InvalidURL:
        sys.exit(f"paceline: '{url}' is not a URL.")
    except httpx.HTTPError:
        sys.exit(f"paceline: no gateway answers at {url}; `paceline up` starts one.")
    try:
        content = answer.json()
    except ValueError:
        sys.exit(f"paceline: what answers at {url} is not a Paceline gateway.")
    if answer.is_error:
        error = content.get("error") if isinstance(content, dict) else None
        said = error.get("message") if isinstance(error, dict) else f"status {answer.status_code}"
        sys.exit(f"paceline: the gateway refused: {said}")
    if not isinstance(content, dict):
        sys.exit(f"paceline: what answers at {url} is not a Paceline gateway.")
    return content
