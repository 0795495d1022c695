"""Show, check, compare, apply and roll back the policy of a running gateway."""

from __future__ import annotations

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

from gateway.cli.client import Gateway, connect, plain_table, print_answer, print_output, read_text
from paceline.terminal import printable

_PATH = "/admin/v1/policy"
# The first line of what `show` prints: `apply` reads from it which version was edited.
_MARK = re.compile(r"\A# policy version (?P<version>\d+), etag (?P<etag>[0-9a-f-]+)$", re.MULTILINE)
_MARK_LINE = re.compile(r"\A# policy version \d+(, etag [0-9a-f-]+)?\n")
_VALUE_CHARS = 60


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


def show(*, version: int | None, url: str) -> int:
    """Print the active policy, or an earlier version."""
    gateway = connect(url, admin=True)
    path = _PATH if version is None else f"{_PATH}/history/{version}"
    response = gateway.send("GET", path, headers={"accept": "application/yaml"})
    number, etag = (response.headers.get(name) for name in ("x-paceline-policy-version", "etag"))
    if number is None:
        raise gateway.unknown_server()
    mark = _mark(number, etag.strip('"')) if etag else f"# policy version {number}"
    sys.stdout.write(f"{mark}\n{printable(response.text)}")
    return 0


def validate(*, file: str, offline: bool, url: str) -> int:
    """Print the problems of a policy; return 1 if there are any."""
    policy = _PolicyFile(file)
    problems: list[tuple[str, str, int | None]] = []
    warnings: Sequence[Mapping[str, Any]] = ()
    if offline:
        from policies.document import PolicyInvalid, parse_policy  # noqa: PLC0415  # seldom needed

        try:
            parse_policy(policy.text, file)
        except PolicyInvalid as invalid:
            problems = list(invalid.problems)
    else:
        answer = policy.post(connect(url, admin=True), "/validate")
        problems = [(one["field"], one["message"], one["line"]) for one in answer["problems"]]
        warnings = answer["warnings"]
    for field, message, line in problems:
        where = f"{file}:{line}" if line else file
        sys.stdout.write(": ".join(part for part in (where, field, message) if part) + "\n")
    for warning in warnings:
        sys.stdout.write(f"{file}: warning: {warning['message']}\n")
    if not problems:
        sys.stdout.write(f"{file} is a valid policy.\n")
    return 1 if problems else 0


def diff(*, file: str, url: str) -> int:
    """Print the changes that a policy would make."""
    return print_output(
        render_difference(_PolicyFile(file).post(connect(url, admin=True), "/diff"))
    )


def apply(*, file: str, note: str, url: str) -> int:
    """Activate a policy, and print its changes."""
    policy, gateway = _PolicyFile(file), connect(url, admin=True)
    difference = policy.post(gateway, "/diff")
    print_output(render_difference(difference))
    if not difference["changes"]:
        return 0
    etag = difference["onto"]["etag"]
    hint = "Nothing has changed. Check `paceline policy diff`, then try again."
    if policy.mark:
        etag = policy.mark["etag"]
        hint = (
            f"Nothing has changed: {file} is based on version {policy.mark['version']}. Merge "
            "the output of `paceline policy show` into the file, including its first line."
        )
    headers = {**policy.headers, **_edit_headers(note, etag)}
    # The gateway stores the text, to which `show` adds the mark of its version.
    content = _MARK_LINE.sub("", policy.text).encode()
    version = gateway.read("PUT", _PATH, content=content, headers=headers, conflict_hint=hint)
    policy.update_mark(version)
    return print_output(f"Version {version['number']} is active.")


def rollback(*, version: int, note: str, url: str) -> int:
    """Activate an earlier version again, and print its changes."""
    gateway = connect(url, admin=True)
    earlier = gateway.read("GET", f"{_PATH}/history/{version}")
    difference = gateway.read("POST", f"{_PATH}/diff", json=earlier["document"])
    print_output(render_difference(difference))
    if not difference["changes"]:
        return 0
    restored = gateway.read(
        "POST",
        f"{_PATH}/rollback",
        json={"version": version},
        headers=_edit_headers(note, difference["onto"]["etag"]),
        conflict_hint="Nothing has changed. Check `paceline policy history`, then try again.",
    )
    return print_output(f"Version {restored['number']} is active.")


def _edit_headers(note: str, etag: str) -> dict[str, str]:
    """Return the author and note of an edit, and its base version."""
    return {
        "x-paceline-author": quote(_author()),
        "x-paceline-note": quote(note),
        "if-match": f'"{etag}"',
    }


def history(*, url: str, as_json: bool) -> int:
    """List the versions of the policy."""
    table = plain_table("Version", "When", "By", "Reason", "Note")
    answer = connect(url, admin=True).read("GET", f"{_PATH}/history")
    for version in answer["versions"]:
        active = version["number"] == answer.get("active")
        number = Text(str(version["number"]), style="green" if active else "")
        rest = (version[name] for name in ("time", "author", "reason", "note"))
        table.add_row(number, *map(Text, rest))
    return print_answer(answer, table, as_json=as_json)


def _mark(number: object, etag: str) -> str:
    return f"# policy version {number}, etag {etag}"


def _author() -> str:
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
        return [Text("The gateway has no requests to replay yet.", style="dim")]
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
