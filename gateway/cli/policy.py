"""`paceline policy`: show, check, compare, apply and take back the policy of a running gateway.

How `paceline policy` shows differences and versions: short, and in colour on a terminal.
"""

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

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gateway.cli.client import add_gateway_url, ask_admin
from policies.document import PolicyInvalid, Problem, parse_policy
from policies.yaml_io import write_yaml

_PATH = "/admin/v1/policy"
_JSON = {"content-type": "application/json"}
_YAML = {"content-type": "application/yaml"}
# The first line of what `show` prints: `apply` reads from it which version was edited.
_MARK = re.compile(r"\A# policy version (?P<version>\d+), etag (?P<etag>[0-9a-f-]+)$", re.MULTILINE)
_Act = Callable[[argparse.Namespace], int]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `policy`."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, act: _Act, says: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=says, description=says)
        add_gateway_url(added, admin=True)
        added.set_defaults(act=act)
        return added

    def file_command(name: str, act: _Act, says: str) -> argparse.ArgumentParser:
        added = command(name, act, says)
        added.add_argument("file", metavar="FILE", help="YAML, or JSON as .json ('-' reads YAML)")
        return added

    show = command("show", _show, "print the policy in force, or an earlier version")
    show.add_argument("--version", type=int, metavar="N", help="this version of it")
    show.add_argument("--json", action="store_true", help="print JSON in place of YAML")
    validate = file_command("validate", _validate, "say whether a policy could be in force")
    validate.add_argument(
        "--offline", action="store_true", help="check it here, without asking a gateway"
    )
    file_command("diff", _diff, "say what a policy would change, and what it would move")
    apply = file_command("apply", _apply, "put a policy in force")
    apply.add_argument("--note", required=True, help="what for: it is kept with the version")
    apply.add_argument("--author", default=_author(), help="who (default: %(default)s)")
    command("history", _history, "list the versions of the policy, the newest first")
    rollback = command("rollback", _rollback, "put in force what an earlier version says")
    rollback.add_argument("version", type=int, metavar="VERSION")
    rollback.add_argument("--note", default="", help="what for: it is kept with the version")
    rollback.add_argument("--author", default=_author(), help="who (default: %(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run one command of `policy`; 1 where the policy is not good."""
    act: _Act = options.act
    return act(options)


class _Written(NamedTuple):
    """A policy as it stands in a file."""

    name: str
    text: str
    kind: Mapping[str, str]

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

    def ask(self, url: str, path: str) -> Mapping[str, Any]:
        content = self.text.encode()
        told, _ = ask_admin(url, "POST", _PATH + path, content=content, headers=self.kind)
        return told

    def mark_anew(self, version: Mapping[str, Any]) -> None:
        """Note in the file that it is this version now, where it told of another."""
        if self.mark is not None and self.name != "-":
            line = _mark(version["number"], version["etag"])
            try:
                Path(self.name).write_text(_MARK.sub(line, self.text, count=1), encoding="utf-8")
            except OSError as error:
                sys.stderr.write(f"paceline: {self.name} still names the version before: {error}\n")


def _show(options: argparse.Namespace) -> int:
    if options.version is None:
        document, headers = ask_admin(options.url, "GET", _PATH)
        mark = _mark(headers["x-paceline-policy-version"], headers["etag"].strip('"'))
    else:
        told, _ = ask_admin(options.url, "GET", f"{_PATH}/history/{options.version}")
        document, mark = told["document"], f"# policy version {told['number']}, as it was"
    if options.json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(f"{mark}\n{write_yaml(document)}")
    return 0


def _validate(options: argparse.Namespace) -> int:
    written = _Written.read(options.file)
    if options.offline:
        problems, warnings = _problems_here(written), []
    else:
        told = written.ask(options.url, "/validate")
        problems = [Problem(**one) for one in told["problems"]]
        warnings = [f"warning: {one['message']}" for one in told["warnings"]]
    for field, message, line in problems:
        where = f"{written.name}:{line}" if line else written.name
        sys.stdout.write(": ".join(part for part in (where, field, message) if part) + "\n")
    for warning in warnings:
        sys.stdout.write(f"{written.name}: {warning}\n")
    if not problems:
        sys.stdout.write(f"{written.name} is a good policy.\n")
    return 1 if problems else 0


def _problems_here(written: _Written) -> list[Problem]:
    try:
        parse_policy(written.text, written.name)
    except PolicyInvalid as invalid:
        return list(invalid.problems)
    return []


def _diff(options: argparse.Namespace) -> int:
    _tell(render_difference(_Written.read(options.file).ask(options.url, "/diff")))
    return 0


def _apply(options: argparse.Namespace) -> int:
    written = _Written.read(options.file)
    difference = written.ask(options.url, "/diff")
    _tell(render_difference(difference))
    if not difference["changes"]:
        return 0
    edited = written.mark["etag"] if written.mark else difference["onto"]["etag"]
    version, _ = ask_admin(
        options.url,
        "PUT",
        _PATH,
        content=written.text.encode(),
        headers={**written.kind, **_signed(options), "if-match": f'"{edited}"'},
        overtaken=_overtaken(written),
    )
    written.mark_anew(version)
    return _in_force(version)


def _history(options: argparse.Namespace) -> int:
    told, _ = ask_admin(options.url, "GET", f"{_PATH}/history")
    _tell(render_history(told["versions"]))
    return 0


def _rollback(options: argparse.Namespace) -> int:
    earlier, _ = ask_admin(options.url, "GET", f"{_PATH}/history/{options.version}")
    difference, _ = ask_admin(options.url, "POST", f"{_PATH}/diff", json=earlier["document"])
    _tell(render_difference(difference))
    if not difference["changes"]:
        return 0
    version, _ = ask_admin(
        options.url,
        "POST",
        f"{_PATH}/rollback",
        json={"version": options.version},
        headers={**_signed(options), "if-match": f'"{difference["onto"]["etag"]}"'},
        overtaken="Nothing was changed; look at `paceline policy history`, and try again.",
    )
    return _in_force(version)


def _overtaken(written: _Written) -> str:
    """Say what to do where somebody else's edit came first."""
    if written.mark is None:
        return "Nothing was changed; look at `paceline policy diff`, and try again."
    return (
        f"{written.name} was made from version {written.mark['version']}, and nothing was changed. "
        "See what is in force now with `paceline policy show`, bring it into the file, and then "
        "the first line too."
    )


def _in_force(version: Mapping[str, Any]) -> int:
    sys.stdout.write(f"Version {version['number']} is in force.\n")
    return 0


def _tell(shown: Shown) -> None:
    Console(highlight=False, soft_wrap=True).print(shown)


def _mark(number: object, etag: str) -> str:
    return f"# policy version {number}, etag {etag}"


def _signed(options: argparse.Namespace) -> dict[str, str]:
    return {"x-paceline-author": quote(options.author), "x-paceline-note": quote(options.note)}


def _author() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a user without a name, as in a container
        return socket.gethostname()


Shown = Group | Table
_VALUE_CHARS = 60


def render_difference(told: Mapping[str, Any]) -> Group:
    """Show what an edit would change, field by field, and which requests it would move."""
    onto = told["onto"]
    against = f"Against version {onto['number']}, by {onto['author']}: {onto['note']}"
    changes = [_change(change) for change in told["changes"]] or [Text("Nothing would change.")]
    moves = _moves(told["decisions"], told["moves"]) if told["changes"] else []
    warnings = [Text(f"! {warning['message']}", style="yellow") for warning in told["warnings"]]
    return Group(Text(against, style="dim"), *changes, *moves, *warnings)


def render_history(versions: Iterable[Mapping[str, Any]]) -> Table:
    """Show the versions, the one in force first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("Version", "When", "By", "Reason", "Note"):
        table.add_column(column, overflow="fold", no_wrap=column in {"Version", "When"})
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
        return [Text("No request has come yet to say what would move.", style="dim")]
    moved = [move for move in moves if move["from"] != move["to"]]
    total = sum(move["count"] for move in moved)
    headline = f"Of the last {decisions} requests {total or 'none'} would go elsewhere"
    return [
        Text(f"{headline}:" if moved else f"{headline}.", style="bold"),
        *(Text(f"  {move['from']} -> {move['to']}: {move['count']}") for move in moved),
    ]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 3]}..."
