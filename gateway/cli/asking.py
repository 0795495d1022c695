"""Ask a running gateway: its data plane with the clients' key, its admin plane with the admins'."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
# What an edit would move is worked out over the last ten thousand requests.
_ADMIN_TIMEOUT_S = 60.0


def add_gateway_url(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which gateway to ask."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the gateway (default: %(default)s)")


def ask_gateway(url: str, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
    """Ask a running gateway for JSON; end the command with one clear sentence if it refuses.

    `PACELINE_API_KEY` is sent along when the environment has one.
    """
    answer = _ask(url, method, path, key="PACELINE_API_KEY", json=body, timeout=_TIMEOUT_S)
    return _told(url, _accepted(url, answer))


def ask_admin(
    url: str, method: str, path: str, *, overtaken: str = "", **request: Any
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Ask the admin plane for JSON and its headers; end the command if it refuses.

    `PACELINE_ADMIN_KEY` is sent along when the environment has one. `overtaken` is said behind the
    gateway's own words where somebody else's edit came first.
    """
    answer = _ask_admin(url, method, path, **request)
    if answer.status_code == httpx.codes.PRECONDITION_FAILED:
        sys.exit(f"paceline: {_refusal(answer)} {overtaken}".rstrip())
    return _told(url, _accepted(url, answer)), answer.headers


def ask_admin_for_text(url: str, path: str) -> str:
    """Ask the admin plane for a text that is not JSON; end the command as `ask_admin` does."""
    return _accepted(url, _ask_admin(url, "GET", path)).text


def _ask_admin(url: str, method: str, path: str, **request: Any) -> httpx.Response:
    answer = _ask(url, method, path, key="PACELINE_ADMIN_KEY", timeout=_ADMIN_TIMEOUT_S, **request)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        sys.exit("paceline: the gateway asks for the key of its admins: set PACELINE_ADMIN_KEY.")
    return answer


def _ask(url: str, method: str, path: str, *, key: str, **request: Any) -> httpx.Response:
    secret = os.environ.get(key)
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    headers |= request.pop("headers", {})
    try:
        return httpx.request(method, url + path, headers=headers, **request)
    except httpx.InvalidURL:
        sys.exit(f"paceline: '{url}' is not a URL.")
    except httpx.HTTPError:
        sys.exit(f"paceline: no gateway answers at {url}; `paceline up` starts one.")


def _accepted(url: str, answer: httpx.Response) -> httpx.Response:
    """Return an answer that is no error."""
    if answer.is_error:
        if _content(answer) is None:
            _not_a_gateway(url)
        sys.exit(f"paceline: the gateway refused: {_refusal(answer)}")
    return answer


def _told(url: str, answer: httpx.Response) -> Mapping[str, Any]:
    content = _content(answer)
    if content is None:
        _not_a_gateway(url)
    return content


def _refusal(answer: httpx.Response) -> str:
    error = (_content(answer) or {}).get("error")
    said = error.get("message") if isinstance(error, dict) else None
    return said if isinstance(said, str) else f"status {answer.status_code}"


def _content(answer: httpx.Response) -> Mapping[str, Any] | None:
    """Read a JSON object; None where there is none."""
    try:
        content = answer.json()
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _not_a_gateway(url: str) -> NoReturn:
    sys.exit(f"paceline: what answers at {url} is not a Paceline gateway.")
