"""`paceline keys`: make keys, list them, revoke one, see what they have used."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cli.client import add_gateway_url, ask_admin, ask_admin_for_text
from policies.document import Priority

_PATH = "/admin/v1/keys"
_USAGE_PATH = "/admin/v1/usage"
_USAGE_COLUMNS = (
    *("day", "key", "name", "team", "requests"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "guessed_tokens"),
)
_LIMITS = ("requests_a_minute", "tokens_a_minute", "concurrent_requests", "tokens_a_day")
_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
_STATE_STYLES = {"active": "green", "expired": "yellow", "revoked": "red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands under `keys`; each sends PACELINE_ADMIN_KEY where it is set."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = commands.add_parser("create", help="make a key; its secret is shown this once")
    create.add_argument("name", help="who it is for")
    create.add_argument("--team", help="usage is summed by team")
    create.add_argument("--model", action="append", dest="models", help="only this one (repeat)")
    create.add_argument("--pool", action="append", dest="pools", help="only this one (repeat)")
    create.add_argument(
        "--priority", choices=[str(one) for one in Priority], help="the highest it may ask for"
    )
    for limit in _LIMITS:
        create.add_argument(f"--{limit.replace('_', '-')}", type=int, metavar="N")
    create.add_argument(
        "--expires-in", type=_duration, metavar="TIME", help="90m, 12h or 30d (default: never)"
    )
    create.set_defaults(act=_create)
    listing = commands.add_parser("list", help="list all keys, without their secrets")
    listing.set_defaults(act=_list)
    revoke = commands.add_parser("revoke", help="end a key for good, running answers included")
    revoke.add_argument("id", help="as `paceline keys list` shows it")
    revoke.set_defaults(act=_revoke)
    usage = commands.add_parser("usage", help="tell what keys have used, by day (UTC)")
    usage.add_argument("--from", dest="first", metavar="DAY", help="like 2026-11-01")
    usage.add_argument("--to", dest="last", metavar="DAY", help="like 2026-11-30 (default: today)")
    usage.set_defaults(act=_usage)
    for command in (create, listing, revoke, usage):
        add_gateway_url(command, admin=True)
        forms = command.add_mutually_exclusive_group()
        forms.add_argument("--json", action="store_true", help="print the gateway's own answer")
        if command is usage:
            forms.add_argument("--csv", action="store_true", help="print CSV")


def run(options: argparse.Namespace) -> int:
    """Run one command of `keys`."""
    told = options.act(options)
    if options.json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    return 0


def _create(options: argparse.Namespace) -> Mapping[str, Any]:
    wanted = {
        name: getattr(options, name)
        for name in ("name", "team", "models", "pools", "priority", *_LIMITS)
    }
    if options.expires_in is not None:
        wanted["expires_at"] = (datetime.now(UTC) + options.expires_in).isoformat()
    told = _ask(options, "POST", _PATH, {k: v for k, v in wanted.items() if v is not None})
    if not options.json:
        sys.stdout.write(
            f"Key {told['id']} for {told['name']}. Its secret is shown this once:\n\n"
            f"{told['secret']}\n"
        )
    return told


def _list(options: argparse.Namespace) -> Mapping[str, Any]:
    told = _ask(options, "GET", _PATH)
    if not options.json:
        table = _table("Id", "Name", "Team", "Begins", "State", "May use", "Limits")
        for key in told["keys"]:
            state = Text(key["state"], style=_STATE_STYLES.get(key["state"], ""))
            only = ", ".join([*key["models"], *key["pools"]]) or "all"
            table.add_row(
                *(key["id"], key["name"], key["team"], key["prefix"], state, only, _limits(key))
            )
        Console(highlight=False).print(table)
    return told


def _revoke(options: argparse.Namespace) -> Mapping[str, Any]:
    told = _ask(options, "DELETE", f"{_PATH}/{quote(options.id, safe='')}")
    if not options.json:
        sys.stdout.write(f"Key {told['id']} for {told['name']} opens nothing any more.\n")
    return told


def _usage(options: argparse.Namespace) -> Mapping[str, Any]:
    days = {"from": options.first, "to": options.last}
    query = {name: day for name, day in days.items() if day is not None}
    if options.csv:
        path = f"{_USAGE_PATH}?{urlencode({**query, 'format': 'csv'})}"
        sys.stdout.write(ask_admin_for_text(options.url, path))
        return {}
    told = _ask(options, "GET", f"{_USAGE_PATH}?{urlencode(query)}")
    if not options.json:
        table = _table("Day", "Key", "Name", "Team")
        for column in ("Requests", "Prompt", "Cached", "Completion", "Guessed"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in told["rows"]:
            table.add_row(*(str(row[column]) for column in _USAGE_COLUMNS))
        Console(highlight=False).print(table)
    return told


def _ask(
    options: argparse.Namespace, method: str, path: str, body: Any = None
) -> Mapping[str, Any]:
    told, _ = ask_admin(options.url, method, path, json=body)
    return told


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _limits(key: Mapping[str, Any]) -> str:
    """Say what a key is limited to, in words."""
    said = [f"{key[name]} {name.replace('_', ' ')}" for name in _LIMITS if key[name] is not None]
    if key["expires_at"] is not None:
        said.append(f"until {key['expires_at'][:16]}")
    return ", ".join(said) or "none"


def _duration(text: str) -> timedelta:
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError("must be like 90m, 12h or 30d")
    return timedelta(seconds=int(found[1]) * _UNITS_S[found[2]])
