"""Show, check, compare, apply and roll back the policy of a running gateway."""

from __future__ import annotations

import argparse
import getpass
import json
import re
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import quote

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gateway.cli.client import (
    add_gateway_url,
    call_admin,
    plain_table,
    print_json,
    print_output,
)
from policies.document import PolicyInvalid, Problem, parse_policy
from policies.yaml_io import write_yaml

_PATH = "/admin/v1/policy"
_JSON = {"content-type": "application/json"}
_YAML = {"content-type": "application/yaml"}
# The first line of what `show` prints: `apply` reads from it which version was edited.
_MARK = re.compile(r"\A# policy version (?P<version>\d+), etag (?P<etag>[0-9a-f-]+)$", re.MULTILINE)
_VALUE_CHARS = 60
_Command = Callable[[argparse.Namespace], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `policy`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run_command: _Command, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        add_gateway_url(added, admin=True)
        added.set_defaults(command=run_command)
        return added

    def file_command(name: str, run_command: _Command, summary: str) -> argparse.ArgumentParser:
        added = command(name, run_command, summary)
        added.add_argument("file", metavar="FILE", help="YAML, or JSON as .json ('-' reads YAML)")
        return added

    show = command("show", _show, "print the active policy, or an earlier version")
    show.add_argument("--version", type=int, metavar="N", help="print this version")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    validate = file_command("validate", _validate, "check whether a policy is valid")
    validate.add_argument("--offline", action="store_true", help="check it without a gateway")
    file_command("diff", _diff, "show what a policy would change, and which requests it would move")
    apply = file_command("apply", _apply, "activate a policy")
    apply.add_argument("--note", required=True, help="the purpose; it is stored with the version")
    apply.add_argument(
        "--author", default=_default_author(), help="the author (default: %(default)s)"
    )
    command("history", _history, "list the versions of the policy, the newest first")
    rollback = command("rollback", _rollback, "activate an earlier version again")
    rollback.add_argument("version", type=int, metavar="VERSION")
    rollback.add_argument("--note", default="", help="the purpose; it is stored with the version")
    rollback.add_argument(
        "--author", default=_default_author(), help="the author (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Run one command of `policy`; return 1 if the policy is invalid."""
    command: _Command = options.command
    return command(options)


class _PolicyFile(NamedTuple):
    """A policy in a file."""

    name: str
    text: str
    headers: Mapping[str, str]

    @classmethod
    def read(cls, name: str) -> Self:
        try:
            text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            sys.exit(f"paceline: cannot read {name}: {error}")
        return cls(name, text, _JSON if name.endswith(".json") else _YAML)

    @property
    def mark(self) -> re.Match[str] | None:
        return _MARK.search(self.text)

    def post(self, url: str, path: str) -> Mapping[str, Any]:
        content = self.text.encode()
        answer, _ = call_admin(url, "POST", _PATH + path, content=content, headers=self.headers)
        return answer

    def update_mark(self, version: Mapping[str, Any]) -> None:
        """Write the new version into the first line of the file, if it names one."""
        if self.mark is not None and self.name != "-":
            line = _mark(version["number"], version["etag"])
            try:
                Path(self.name).write_text(_MARK.sub(line, self.text, count=1), encoding="utf-8")
            except OSError as error:
                sys.stderr.write(
                    f"paceline: {self.name} still names the previous version: {error}\n"
                )


def _show(options: argparse.Namespace) -> int:
    if options.version is None:
        document, headers = call_admin(options.url, "GET", _PATH)
        mark = _mark(headers["x-paceline-policy-version"], headers["etag"].strip('"'))
    else:
        answer, _ = call_admin(options.url, "GET", f"{_PATH}/history/{options.version}")
        document, mark = answer["document"], f"# policy version {answer['number']}"
    if options.json:
        print_json(document)
    else:
        sys.stdout.write(f"{mark}\n{write_yaml(document)}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    file = _PolicyFile.read(options.file)
    if options.offline:
        problems, warnings = _problems_here(file), []
    else:
        answer = file.post(options.url, "/validate")
        problems = [Problem(**one) for one in answer["problems"]]
        warnings = [f"warning: {one['message']}" for one in answer["warnings"]]
    for field, message, line in problems:
        where = f"{file.name}:{line}" if line else file.name
        sys.stdout.write(": ".join(part for part in (where, field, message) if part) + "\n")
    for warning in warnings:
        sys.stdout.write(f"{file.name}: {warning}\n")
    if not problems:
        sys.stdout.write(f"{file.name} is a valid policy.\n")
    return 1 if problems else 0


def _problems_here(file: _PolicyFile) -> list[Problem]:
    try:
        parse_policy(file.text, file.name)
    except PolicyInvalid as invalid:
        return list(invalid.problems)
    return []


def _diff(options: argparse.Namespace) -> int:
    print_output(render_difference(_PolicyFile.read(options.file).post(options.url, "/diff")))
    return 0


def _apply(options: argparse.Namespace) -> int:
    file = _PolicyFile.read(options.file)
    difference = file.post(options.url, "/diff")
    print_output(render_difference(difference))
    if not difference["changes"]:
        return 0
    edited = file.mark["etag"] if file.mark else difference["onto"]["etag"]
    version, _ = call_admin(
        options.url,
        "PUT",
        _PATH,
        content=file.text.encode(),
        headers={**file.headers, **_author_headers(options), "if-match": f'"{edited}"'},
        conflict_hint=_conflict_hint(file),
    )
    file.update_mark(version)
    return _print_version(version)


def _history(options: argparse.Namespace) -> int:
    answer, _ = call_admin(options.url, "GET", f"{_PATH}/history")
    print_output(render_history(answer["versions"]))
    return 0


def _rollback(options: argparse.Namespace) -> int:
    earlier, _ = call_admin(options.url, "GET", f"{_PATH}/history/{options.version}")
    difference, _ = call_admin(options.url, "POST", f"{_PATH}/diff", json=earlier["document"])
    print_output(render_difference(difference))
    if not difference["changes"]:
        return 0
    version, _ = call_admin(
        options.url,
        "POST",
        f"{_PATH}/rollback",
        json={"version": options.version},
        headers={**_author_headers(options), "if-match": f'"{difference["onto"]["etag"]}"'},
        conflict_hint="Nothing was changed. Check `paceline policy history`, then try again.",
    )
    return _print_version(version)


def _conflict_hint(file: _PolicyFile) -> str:
    """Return the advice for an edit that is not based on the active version."""
    if file.mark is None:
        return "Nothing was changed. Check `paceline policy diff`, then try again."
    return (
        f"Nothing was changed: {file.name} is based on version {file.mark['version']}. Merge the "
        "output of `paceline policy show` into the file, including its first line."
    )


def _print_version(version: Mapping[str, Any]) -> int:
    sys.stdout.write(f"Version {version['number']} is active.\n")
    return 0


def _mark(number: object, etag: str) -> str:
    return f"# policy version {number}, etag {etag}"


def _author_headers(options: argparse.Namespace) -> dict[str, str]:
    return {"x-paceline-author": quote(options.author), "x-paceline-note": quote(options.note)}


def _default_author() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as in a container
        return socket.gethostname()


def render_difference(diff: Mapping[str, Any]) -> Group:
    """Render the changes of an edit, field by field, and the requests that it would move."""
    base = diff["onto"]
    against = f"Against version {base['number']}, by {base['author']}: {base['note']}"
    changes = [_change(change) for change in diff["changes"]] or [Text("No change.")]
    moves = _moves(diff["decisions"], diff["moves"]) if diff["changes"] else []
    warnings = [Text(f"! {warning['message']}", style="yellow") for warning in diff["warnings"]]
    return Group(Text(against, style="dim"), *changes, *moves, *warnings)


def render_history(versions: Iterable[Mapping[str, Any]]) -> Table:
    """Render the versions, the active one first."""
    table = plain_table("Version", "When", "By", "Reason", "Note", no_wrap=("Version", "When"))
    for index, version in enumerate(versions):
        number = Text(str(version["number"]), style="" if index else "green")
        rest = (version[name] for name in ("time", "author", "reason", "note"))
        table.add_row(number, *map(Text, rest))
    return table


def _change(change: Mapping[str, Any]) -> Text:
    field = change["field"]
    if "old" not in change:
        return Text(f"+ {field}: {_short(change['new'])}", style="green")
    if "new" not in change:
        return Text(f"- {field}: {_short(change['old'])}", style="red")
    return Text.assemble(
        f"~ {field}: ",
        (_short(change["old"]), "red"),
        " -> ",
        (_short(change["new"]), "green"),
    )


def _moves(decisions: int, moves: Iterable[Mapping[str, Any]]) -> list[Text]:
    if not decisions:
        return [Text("There are no requests to replay yet.", style="dim")]
    moved = [move for move in moves if move["from"] != move["to"]]
    total = sum(move["count"] for move in moved)
    headline = f"Of the last {decisions} requests {total or 'none'} would move"
    return [
        Text(f"{headline}:" if moved else f"{headline}.", style="bold"),
        *(Text(f"  {move['from']} -> {move['to']}: {move['count']}") for move in moved),
    ]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 3]}..."
