"""HTTP requests of commands to a running gateway, and tables and JSON on a terminal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.cli import CommandError
from gateway.config.settings import load_settings
from gateway.config.startup_checks import local_url, secret_file
from gateway.types import header_problem
from paceline.addresses import is_loopback
from paceline.command_line import is_own
from paceline.terminal import printable

if TYPE_CHECKING:
    import httpx

# A diff of the policy replays the last ten thousand requests.
_TIMEOUT_S = 30.0
_API_KEY = "PACELINE_API_KEY"
_ADMIN_KEY = "PACELINE_ADMIN_KEY"
_FILE_PROBLEMS: Mapping[type[OSError], str] = {
    FileNotFoundError: "there is no such file",
    IsADirectoryError: "it is a folder",
    PermissionError: "you are not allowed to read it",
}


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway, as a command sends requests to it."""

    url: str
    key_variable: str
    """The environment variable of the API key or admin key, which is sent if it is set."""

    @property
    def has_key(self) -> bool:
        """Whether there is a key to send."""
        return bool(self._key()[0])

    def read(self, method: str, path: str, **request: Any) -> Mapping[str, Any]:
        """Return a JSON object as `send` returns a response."""
        return self.json_of(self.send(method, path, **request))

    def send(
        self, method: str, path: str, *, conflict_hint: str = "", **request: Any
    ) -> httpx.Response:
        """Return a successful response; raise `CommandError` for any other.

        `conflict_hint` follows the gateway's message if another edit came first.
        """
        with (
            self.stream(method, path, conflict_hint=conflict_hint, **request) as response,
            self._reached(),
        ):
            response.read()
        return response

    @contextlib.contextmanager
    def stream(
        self, method: str, path: str, *, conflict_hint: str = "", **request: Any
    ) -> Iterator[httpx.Response]:
        """Yield a successful response whose body is still to be read, as `send` returns one."""
        self._check_listening()
        import httpx  # noqa: PLC0415  # for a tenth of a second: not to say that nothing listens

        with contextlib.ExitStack() as stack:
            secret, source = self._key()
            if problem := header_problem(secret):
                raise CommandError(f"{source} {problem}.")
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            with self._reached():
                client = stack.enter_context(httpx.Client(headers=headers, timeout=_TIMEOUT_S))
                response = stack.enter_context(client.stream(method, self.url + path, **request))
                if response.is_error:
                    response.read()
            if response.is_error:
                raise self._refusal(response, secret, source, conflict_hint)
            yield response

    def _check_listening(self) -> None:
        """Raise `CommandError` if this machine itself refuses the connection.

        The request shows all other problems, including a wrong URL.
        """
        if is_loopback(self._address()[0]):
            try:
                socket.create_connection(self._address(), timeout=1).close()
            except ConnectionRefusedError:
                raise self._unreachable() from None
            except OSError:
                return

    def _address(self) -> tuple[str, int]:
        """Return host and port of the URL; no host if it is not a URL."""
        try:
            parts = urlsplit(self.url)
            return parts.hostname or "", parts.port or 80
        except ValueError:
            return "", 80

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise `CommandError` for each error of the HTTP client."""
        import httpx  # noqa: PLC0415  # as in `stream`

        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise CommandError(f"'{self.url}' is not a URL.") from None
        except httpx.HTTPError:
            raise self._unreachable() from None

    def _unreachable(self) -> CommandError:
        return CommandError(f"no gateway answers at {self.url}; `paceline up` starts one.")

    def _refusal(
        self, response: httpx.Response, secret: str, source: str, conflict_hint: str
    ) -> CommandError:
        """Return the error for a response with an error status, in the gateway's words."""
        if response.status_code == HTTPStatus.UNAUTHORIZED and not secret and source == _API_KEY:
            context = click.get_current_context(silent=True)
            command = context.command_path if context else "paceline ..."
            return CommandError(f"this gateway needs a key: {_API_KEY}=pk-... {command}")
        hints: dict[int, str] = {
            HTTPStatus.PRECONDITION_FAILED: conflict_hint,
            HTTPStatus.UNAUTHORIZED: f"The command reads it from {source}.",
        }
        reason = f"status {response.status_code}"
        match self.json_of(response):
            case {"error": {"message": str(message)}}:
                reason = message
        hint = hints.get(response.status_code, "")
        return CommandError(f"the gateway refused: {reason} {hint}".rstrip())

    def _key(self) -> tuple[str, str]:
        """Return the key and where it comes from: on this machine, the admin key if none is set.

        No other machine gets the stored admin key, and no gateway gets a key without a variable.
        """
        secret = os.environ.get(self.key_variable, "")
        if secret or not self.key_variable or not is_own(self._address()[0]):
            return secret, self.key_variable
        if self.key_variable == _ADMIN_KEY:
            return self._stored_admin_key()
        secret, source = os.environ.get(_ADMIN_KEY, ""), _ADMIN_KEY
        if not secret:
            with contextlib.suppress(CommandError):
                secret, source = self._stored_admin_key()
        return (secret, f"{_API_KEY}, or else from {source}") if secret else ("", _API_KEY)

    def _stored_admin_key(self) -> tuple[str, str]:
        settings = load_settings()
        if settings.admin_key is not None:
            return settings.admin_key.get_secret_value(), _ADMIN_KEY
        path = secret_file(settings, "admin_key")
        source = f"{_ADMIN_KEY}, or else from {path}"
        try:
            return path.read_text(errors="replace").strip(), source
        except FileNotFoundError:
            return "", source
        except OSError as error:
            raise CommandError(f"cannot read {path}: {error}") from None

    def json_of(self, response: httpx.Response) -> Mapping[str, Any]:
        """Return the JSON object of a response."""
        with contextlib.suppress(ValueError):
            content = response.json()
            if isinstance(content, dict):
                cleaned: Mapping[str, Any] = _printable(content)
                return cleaned
        raise self.unknown_server()

    def unknown_server(self) -> CommandError:
        """Return the error for a response that no gateway sends."""
        return CommandError(f"the server at {self.url} is not a Paceline gateway.")


def connect(url: str, *, admin: bool = False) -> Gateway:
    """Return the gateway at a URL; without one, that which runs here with the same settings.

    With `admin`, the default is the port for admins, if the settings name one.
    """
    key_variable = _ADMIN_KEY if admin else _API_KEY
    if url:
        return Gateway(url, key_variable)
    settings = load_settings()
    host, port = settings.host, settings.port
    if admin and settings.admin_port is not None:
        host, port = settings.admin_host, settings.admin_port
    if not port:
        raise CommandError(
            "the settings let the gateway use any port; name its address with --url."
        )
    if not is_own(host):
        # Those of the working folder may be another person's: no key goes where they say.
        raise CommandError(
            f"the settings name the host {host!r}, which is not this machine; name it with --url."
        )
    return Gateway(local_url(host, port), key_variable)


def plain_table(*columns: str, numbers: Collection[str] = ()) -> Table:
    """Return a table without lines for a terminal or a pipe; `numbers` are its last columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def read_text(name: str) -> str:
    """Return the content of a file, or of standard input for `-`."""
    source = "standard input" if name == "-" else name
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot read {source}: {file_problem(error)}.") from None
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {source}: it is not text in UTF-8.") from None


def file_problem(error: OSError) -> str:
    """Return why a file cannot be read, as the end of a sentence."""
    told = error.strerror or "the system cannot read it"
    return _FILE_PROBLEMS.get(type(error), told)


def print_answer(answer: object, shown: RenderableType, *, as_json: bool) -> int:
    """Print the gateway's answer as JSON, or its form for a terminal; return 0."""
    if not as_json:
        return print_output(shown)
    print_json(answer)
    return 0


def print_output(*shown: RenderableType) -> int:
    """Print tables and texts, with colours only on a terminal; return 0."""
    for one in shown:
        console = Console(highlight=False, markup=False, emoji=False)
        # A pipe gets whole lines.
        console.soft_wrap = not (console.is_terminal or isinstance(one, Table))
        console.print(fitting(one, console))
    return 0


def local_time(text: str) -> str:
    """Return a time of the gateway in the zone of this machine, which it names."""
    return f"{datetime.fromisoformat(text).astimezone():%Y-%m-%d %H:%M %Z}"


def fitting(shown: RenderableType, console: Console) -> RenderableType:
    """Return the table as text, or as paragraphs if it is too wide."""
    if isinstance(shown, Table) and console.measure(shown).maximum >= console.width:
        shown = "\n".join((*_paragraphs(shown, console.width), str(shown.caption or "")))
    return Text(shown.rstrip("\n")) if isinstance(shown, str) else shown


def _paragraphs(table: Table, width: int) -> Iterator[str]:
    """Yield the lines of a table that is too wide: a title for each row, then its cells.

    So no column is lost, and no name, date or id is cut in two.
    """
    names = [" ".join(str(column.header).split()) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        title, *cells = ([line.strip() for line in str(cell).split("\n") if line] for cell in row)
        if title:  # else it is that of the row before
            yield ", ".join(title)
        for line in itertools.zip_longest(*cells, fillvalue=""):
            said = [f"{name}: {text}" for name, text in zip(names[1:], line, strict=True) if text]
            room = ""
            for fact in said:
                if room and len(room) + len(fact) + 4 > width:
                    yield room
                    room = ""
                room = f"{room}  {fact}" if room else f"  {fact}"
            yield room


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _printable(value: Any) -> Any:
    """Return a JSON value without control characters in its text."""
    match value:
        case str():
            return printable(value)
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {printable(name): _printable(item) for name, item in value.items()}
    return value
