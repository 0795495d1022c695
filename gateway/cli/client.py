"""Ask a running gateway: its data plane with the clients' key, its admin plane with the admins'."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from gateway.cli.up import on_this_machine
from gateway.config.settings import load_settings
from gateway.config.startup_checks import base_url
from gateway.types import fits_header

# What an edit of the policy would move is worked out over the last ten thousand requests.
_TIMEOUT_S = 30.0


class NoAnswer(Exception):
    """A gateway did not answer as asked; the message is one sentence for a terminal."""


def add_gateway_url(parser: argparse.ArgumentParser, *, admin: bool = False) -> None:
    """Add the option that says which gateway to ask; without it, where one with these settings is.

    `admin`: what is asked is served where only admins are, if they have a port of their own.
    """
    parser.add_argument(
        "--url",
        type=lambda url: url or _own_address(admin=admin),  # settings are read only where needed
        default="",
        help="the gateway (default: where the settings put it, else http://127.0.0.1:8000)",
    )


def ask_gateway(url: str, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
    """Ask a running gateway for JSON; end the command with one clear sentence if it refuses.

    `PACELINE_API_KEY` is sent along when the environment has one.
    """
    with _or_end():
        return read_gateway(url, method, path, json=body)


def read_gateway(url: str, method: str, path: str, **request: Any) -> Mapping[str, Any]:
    """Ask a running gateway for JSON as `ask_gateway` does; raise `NoAnswer` if it refuses."""
    return _told(url, _ask(url, method, path, key_from="PACELINE_API_KEY", **request))


def ask_admin(
    url: str, method: str, path: str, *, overtaken: str = "", **request: Any
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Ask the admin plane for JSON and its headers; end the command if it refuses.

    `PACELINE_ADMIN_KEY` is sent along when the environment has one. `overtaken` is said behind the
    gateway's own words where somebody else's edit came first.
    """
    asked: dict[str, Any] = {"key_from": "PACELINE_ADMIN_KEY", "overtaken": overtaken}
    with _or_end():
        answer = _ask(url, method, path, **asked, **request)
        return _told(url, answer), answer.headers


def ask_admin_for_text(url: str, path: str) -> str:
    """Ask the admin plane for a text that is not JSON; end the command as `ask_admin` does."""
    with _or_end():
        return _ask(url, "GET", path, key_from="PACELINE_ADMIN_KEY").text


@contextlib.contextmanager
def _or_end() -> Iterator[None]:
    """End the command with what went wrong."""
    try:
        yield
    except NoAnswer as reason:
        sys.exit(f"paceline: {reason}")


def _own_address(*, admin: bool) -> str:
    """Tell where a gateway is that is started here with the same settings."""
    settings = load_settings()
    host, port = settings.host, settings.port
    if admin and settings.admin_port is not None:
        host, port = settings.admin_host, settings.admin_port
    if not port:
        sys.exit("paceline: the settings let the gateway take any free port; say where with --url.")
    return on_this_machine(base_url(host, port))


def _ask(
    url: str, method: str, path: str, *, key_from: str, overtaken: str = "", **request: Any
) -> httpx.Response:
    secret = os.environ.get(key_from)
    if secret and not fits_header(secret):
        sys.exit(f"paceline: {key_from} holds what no HTTP header can.")
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    headers |= request.pop("headers", {})
    asked = {"timeout": _TIMEOUT_S} | request
    try:
        answer = httpx.request(method, url + path, headers=headers, **asked)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        sys.exit(f"paceline: '{url}' is not a URL.")
    except httpx.HTTPError:
        raise NoAnswer(f"no gateway answers at {url}; `paceline up` starts one.") from None
    if answer.is_error:
        hints: dict[int, str] = {
            httpx.codes.PRECONDITION_FAILED: overtaken,
            httpx.codes.UNAUTHORIZED: f"The command takes it from {key_from}.",
        }
        said = (_refusal(url, answer), hints.get(answer.status_code, ""))
        raise NoAnswer(f"the gateway refused: {' '.join(filter(None, said))}")
    return answer


def _refusal(url: str, answer: httpx.Response) -> str:
    error = _told(url, answer).get("error")
    said = error.get("message") if isinstance(error, dict) else None
    return said if isinstance(said, str) else f"status {answer.status_code}"


def _told(url: str, answer: httpx.Response) -> Mapping[str, Any]:
    """Read a JSON object; raise `NoAnswer` where there is none."""
    with contextlib.suppress(ValueError):
        content = answer.json()
        if isinstance(content, dict):
            return content
    raise NoAnswer(f"what answers at {url} is not a Paceline gateway.")
