"""Ask a running gateway, for the commands that are about one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY = "PACELINE_API_KEY"
ADMIN_KEY = "PACELINE_ADMIN_KEY"


def add_gateway_url(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, the gateway to ask."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the gateway (default: %(default)s)")


def ask_gateway(
    url: str, method: str, path: str, body: Any = None, *, key_from: str = API_KEY
) -> Mapping[str, Any]:
    """Ask a running gateway for JSON; end the command with one clear sentence if it refuses.

    The key in the environment's `key_from` is sent along when there is one.
    """
    content = _content(_answer(url, method, path, body, key_from), url)
    if not isinstance(content, dict):
        _not_a_gateway(url)
    return content


def ask_for_text(url: str, path: str, *, key_from: str) -> str:
    """Ask a running gateway for a text that is not JSON; end the command as `ask_gateway` does."""
    return _answer(url, "GET", path, None, key_from).text


def _answer(url: str, method: str, path: str, body: Any, key_from: str) -> httpx.Response:
    key = os.environ.get(key_from)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, url + path, json=body, headers=headers, timeout=10.0)
    except httpx.InvalidURL:
        sys.exit(f"paceline: '{url}' is not a URL.")
    except httpx.HTTPError:
        sys.exit(f"paceline: no gateway answers at {url}; `paceline up` starts one.")
    if answer.is_error:
        content = _content(answer, url)
        error = content.get("error") if isinstance(content, dict) else None
        said = error.get("message") if isinstance(error, dict) else f"status {answer.status_code}"
        sys.exit(f"paceline: the gateway refused: {said}")
    return answer


def _content(answer: httpx.Response, url: str) -> Any:
    try:
        return answer.json()
    except ValueError:
        _not_a_gateway(url)


def _not_a_gateway(url: str) -> NoReturn:
    sys.exit(f"paceline: what answers at {url} is not a Paceline gateway.")
