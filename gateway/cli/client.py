"""HTTP calls from a command to a running gateway, and tables and JSON on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import httpx
from rich.console import Console, RenderableType
from rich.table import Table

from gateway.cli.up import on_this_machine
from gateway.config.settings import load_settings
from gateway.config.startup_checks import base_url
from gateway.types import fits_header

# A diff of the policy replays the last ten thousand requests.
_TIMEOUT_S = 30.0


class GatewayUnavailable(Exception):
    """A gateway did not return a usable response; the message is one sentence for a terminal."""


def add_gateway_url(parser: argparse.ArgumentParser, *, admin: bool = False) -> None:
    """Add the option `--url`; its default is the gateway that the settings describe.

    With `admin`, the default is the port for admins, if the settings name one.
    """
    parser.add_argument(
        "--url",
        type=lambda url: url or _own_address(admin=admin),  # settings are read only if needed
        default="",
        help="the gateway (default: the one of the settings, else http://127.0.0.1:8000)",
    )


def call_gateway(url: str, method: str, path: str, body: Any = None) -> Mapping[str, Any]:
    """Return JSON from the data plane; exit with one sentence if the gateway refuses.

    `PACELINE_API_KEY` is sent if the environment has one.
    """
    with _exit_on_failure():
        return read_gateway(url, method, path, json=body)


def read_gateway(url: str, method: str, path: str, **request: Any) -> Mapping[str, Any]:
    """Return JSON as `call_gateway` does; raise `GatewayUnavailable` if the gateway refuses."""
    return _read_json(url, _send(url, method, path, "PACELINE_API_KEY", **request))


def call_admin(
    url: str, method: str, path: str, *, conflict_hint: str = "", **request: Any
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return JSON and headers from the admin plane; exit if the gateway refuses.

    `PACELINE_ADMIN_KEY` is sent if the environment has one. `conflict_hint` follows the gateway's
    message if another edit came first.
    """
    with _exit_on_failure():
        response = _send(
            url, method, path, "PACELINE_ADMIN_KEY", conflict_hint=conflict_hint, **request
        )
        return _read_json(url, response), response.headers


def read_admin_text(url: str, path: str) -> str:
    """Return text from the admin plane; exit as `call_admin` does."""
    with _exit_on_failure():
        return _send(url, "GET", path, "PACELINE_ADMIN_KEY").text


def plain_table(*columns: str, no_wrap: Collection[str] = ()) -> Table:
    """Return a table without lines for a terminal or a pipe."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in no_wrap)
    return table


def print_output(shown: RenderableType) -> None:
    """Print a table or text; colours only on a terminal."""
    Console(highlight=False, soft_wrap=not isinstance(shown, Table)).print(shown)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _exit_on_failure() -> Iterator[None]:
    try:
        yield
    except GatewayUnavailable as reason:
        sys.exit(f"paceline: {reason}")


def _own_address(*, admin: bool) -> str:
    """Return the address of a gateway that runs here with the same settings."""
    settings = load_settings()
    host, port = settings.host, settings.port
    if admin and settings.admin_port is not None:
        host, port = settings.admin_host, settings.admin_port
    if not port:
        sys.exit("paceline: the settings let the gateway take any free port; name it with --url.")
    return on_this_machine(base_url(host, port))


def _send(
    url: str, method: str, path: str, key_variable: str, conflict_hint: str = "", **request: Any
) -> httpx.Response:
    secret = os.environ.get(key_variable)
    if secret and not fits_header(secret):
        sys.exit(f"paceline: {key_variable} contains characters that an HTTP header cannot carry.")
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    headers |= request.pop("headers", {})
    try:
        response = httpx.request(
            method, url + path, headers=headers, **{"timeout": _TIMEOUT_S, **request}
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        sys.exit(f"paceline: '{url}' is not a URL.")
    except httpx.HTTPError:
        raise GatewayUnavailable(
            f"no gateway answers at {url}; `paceline up` starts one."
        ) from None
    if response.is_error:
        hints: dict[int, str] = {
            httpx.codes.PRECONDITION_FAILED: conflict_hint,
            httpx.codes.UNAUTHORIZED: f"The command reads it from {key_variable}.",
        }
        error = _read_json(url, response).get("error")
        message = error.get("message") if isinstance(error, dict) else None
        reason = message if isinstance(message, str) else f"status {response.status_code}"
        hint = hints.get(response.status_code, "")
        raise GatewayUnavailable(f"the gateway refused: {reason} {hint}".rstrip())
    return response


def _read_json(url: str, response: httpx.Response) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        content = response.json()
        if isinstance(content, dict):
            return content
    raise GatewayUnavailable(f"the server at {url} is not a Paceline gateway.")
