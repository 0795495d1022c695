"""Ask a running gateway, for the commands that are about one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY = "PACELINE_API_KEY"
ADMIN_KEY = "PACELINE_ADMIN_KEY"
# What an edit of the policy would move is worked out over the last ten thousand requests.
_TIMEOUT_S = 30.0
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


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


def ask_about_policy(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    overtaken: str = "",
    content: bytes | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Ask for JSON and its headers as an admin; end the command as `ask_gateway` does.

    A body is sent as JSON, `content` as it is. `overtaken` is said behind the gateway's own words
    where somebody else's edit came first.
    """
    answer = _answer(
        url, method, path, body, ADMIN_KEY, hint=overtaken, content=content, headers=headers
    )
    told = _content(answer, url)
    if not isinstance(told, dict):
        _not_a_gateway(url)
    return told, answer.headers


def _answer(
    url: str,
    method: str,
    path: str,
    body: Any,
    key_from: str,
    *,
    hint: str = "",
    headers: Mapping[str, str] = _NO_HEADERS,
    content: bytes | None = None,
) -> httpx.Response:
    key = os.environ.get(key_from)
    sent = {**headers, **({"authorization": f"Bearer {key}"} if key else {})}
    try:
        answer = httpx.request(
            method, url + path, json=body, content=content, headers=sent, timeout=_TIMEOUT_S
        )
    except httpx.InvalidURL:
        sys.exit(f"paceline: '{url}' is not a URL.")
    except httpx.HTTPError:
        sys.exit(f"paceline: no gateway answers at {url}; `paceline up` starts one.")
    if answer.is_error:
        told = _content(answer, url)
        error = told.get("error") if isinstance(told, dict) else None
        said = error.get("message") if isinstance(error, dict) else f"status {answer.status_code}"
        if answer.status_code == httpx.codes.PRECONDITION_FAILED:
            said = f"{said} {hint}".rstrip()
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            said = f"{said} The command takes it from {key_from}."
        sys.exit(f"paceline: the gateway refused: {said}")
    return answer


def _content(answer: httpx.Response, url: str) -> Any:
    try:
        return answer.json()
    except ValueError:
        _not_a_gateway(url)


def _not_a_gateway(url: str) -> NoReturn:
    sys.exit(f"paceline: what answers at {url} is not a Paceline gateway.")
