"""How `paceline policy` shows differences and versions: short, and in colour on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Shown = Group | Table
_VALUE_CHARS = 60


def difference(told: Mapping[str, Any]) -> Group:
    """Show what an edit would change, field by field, and which requests it would move."""
    onto = told["onto"]
    against = f"Against version {onto['number']}, by {onto['author']}: {onto['note']}"
    changes = [_change(change) for change in told["changes"]] or [Text("Nothing would change.")]
    moves = _moves(told["decisions"], told["moves"]) if told["changes"] else []
    warnings = [Text(f"! {warning['sentence']}", style="yellow") for warning in told["warnings"]]
    return Group(Text(against, style="dim"), *changes, *moves, *warnings)


def history(versions: Iterable[Mapping[str, Any]]) -> Table:
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
