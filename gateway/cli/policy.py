"""Show, check, compare, apply and roll back the policy of a running gateway."""

from __future__ import annotations

import argparse
import getpass
import json
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Group
from rich.text import Text

from gateway.cli.client import (
    Gateway,
    add_admin_commands,
    plain_table,
    print_json,
    print_output,
    read_text,
)
from policies.document import PolicyInvalid, Problem, parse_policy
from workers.terminal import printable

_PATH = "/admin/v1/policy"
# The first line of what `show` prints: `apply` reads from it which version was edited.
_MARK = re.compile(r"\A# policy version (?P<version>\d+), etag (?P<etag>[0-9a-f-]+)$", re.MULTILINE)
_MARK_LINE = re.compile(r"\A# policy version \d+(, etag [0-9a-f-]+)?\n")
_VALUE_CHARS = 60


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `policy`."""
    show, validate, diff, apply, _, rollback = add_admin_commands(
        parser,
        {
            _show: ("show", "print the active policy, or an earlier version"),
            _validate: ("validate", "check whether a policy is valid"),
            _diff: ("diff", "show what a policy would change, and which requests it would move"),
            _apply: ("apply", "activate a policy"),
            _history: ("history", "list the versions of the policy, the newest first"),
            _rollback: ("rollback", "activate an earlier version again"),
        },
    )
    show.add_argument("--version", type=int, metavar="N", help="print this version")
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    for command in (validate, diff, apply):
        command.add_argument(
            "file", type=_PolicyFile, metavar="FILE", help="YAML, or JSON as .json ('-' reads YAML)"
        )
    validate.add_argument("--offline", action="store_true", help="check it without a gateway")
    rollback.add_argument("version", type=int, metavar="VERSION")
    note = "the purpose; it is stored with the version"
    apply.add_argument("--note", required=True, help=note)
    rollback.add_argument("--note", default="", help=note)
    for command in (apply, rollback):
        command.add_argument(
            "--author", default=_default_author(), help="the author (default: %(default)s)"
        )


class _PolicyFile:
    """A policy in a file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = read_text(name)
        self.mark = _MARK.search(self.text)
        kind = "json" if name.endswith(".json") else "yaml"
        self.headers = {"content-type": f"application/{kind}"}

    def post(self, gateway: Gateway, path: str) -> Mapping[str, Any]:
        content = self.text.encode()
        return gateway.read("POST", _PATH + path, content=content, headers=self.headers)

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
    path = _PATH if options.version is None else f"{_PATH}/history/{options.version}"
    if options.json:
        shown = options.gateway.read("GET", path)
        print_json(shown if options.version is None else shown["document"])
        return 0
    response = options.gateway.send("GET", path, headers={"accept": "application/yaml"})
    number, etag = (response.headers.get(name) for name in ("x-paceline-policy-version", "etag"))
    if number is None:
        raise options.gateway.unknown_server()
    mark = _mark(number, etag.strip('"')) if etag else f"# policy version {number}"
    sys.stdout.write(f"{mark}\n{printable(response.text)}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    file = options.file
    problems: Sequence[Problem] = ()
    warnings: Sequence[Mapping[str, Any]] = ()
    if options.offline:
        try:
            parse_policy(file.text, file.name)
        except PolicyInvalid as invalid:
            problems = invalid.problems
    else:
        answer = file.post(options.gateway, "/validate")
        problems = [Problem(**one) for one in answer["problems"]]
        warnings = answer["warnings"]
    for field, message, line in problems:
        where = f"{file.name}:{line}" if line else file.name
        sys.stdout.write(": ".join(part for part in (where, field, message) if part) + "\n")
    for warning in warnings:
        sys.stdout.write(f"{file.name}: warning: {warning['message']}\n")
    if not problems:
        sys.stdout.write(f"{file.name} is a valid policy.\n")
    return 1 if problems else 0


def _diff(options: argparse.Namespace) -> int:
    _print_difference(options.file.post(options.gateway, "/diff"))
    return 0


def _apply(options: argparse.Namespace) -> int:
    file = options.file
    difference = file.post(options.gateway, "/diff")
    if not _print_difference(difference):
        return 0
    etag = difference["onto"]["etag"]
    hint = "Nothing was changed. Check `paceline policy diff`, then try again."
    if file.mark:
        etag = file.mark["etag"]
        hint = (
            f"Nothing was changed: {file.name} is based on version {file.mark['version']}. Merge "
            "the output of `paceline policy show` into the file, including its first line."
        )
    headers = {**file.headers, **_edit_headers(options, etag)}
    # The gateway stores the text, to which `show` adds the mark of its version.
    content = _MARK_LINE.sub("", file.text).encode()
    version = options.gateway.read(
        "PUT", _PATH, content=content, headers=headers, conflict_hint=hint
    )
    file.update_mark(version)
    return _print_version(version)


def _rollback(options: argparse.Namespace) -> int:
    earlier = options.gateway.read("GET", f"{_PATH}/history/{options.version}")
    difference = options.gateway.read("POST", f"{_PATH}/diff", json=earlier["document"])
    if not _print_difference(difference):
        return 0
    version = options.gateway.read(
        "POST",
        f"{_PATH}/rollback",
        json={"version": options.version},
        headers=_edit_headers(options, difference["onto"]["etag"]),
        conflict_hint="Nothing was changed. Check `paceline policy history`, then try again.",
    )
    return _print_version(version)


def _print_difference(difference: Mapping[str, Any]) -> bool:
    """Print a difference; return whether it changes anything."""
    print_output(render_difference(difference))
    return bool(difference["changes"])


def _edit_headers(options: argparse.Namespace, etag: str) -> dict[str, str]:
    """Return the author and note of an edit, and the version on which it is based."""
    return {
        "x-paceline-author": quote(options.author),
        "x-paceline-note": quote(options.note),
        "if-match": f'"{etag}"',
    }


def _print_version(version: Mapping[str, Any]) -> int:
    sys.stdout.write(f"Version {version['number']} is active.\n")
    return 0


def _history(options: argparse.Namespace) -> int:
    table = plain_table("Version", "When", "By", "Reason", "Note", no_wrap=("Version", "When"))
    versions = options.gateway.read("GET", f"{_PATH}/history")["versions"]
    for index, version in enumerate(versions):  # the active one is first
        number = Text(str(version["number"]), style="" if index else "green")
        rest = (version[name] for name in ("time", "author", "reason", "note"))
        table.add_row(number, *map(Text, rest))
    print_output(table)
    return 0


def _mark(number: object, etag: str) -> str:
    return f"# policy version {number}, etag {etag}"


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
