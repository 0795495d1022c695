"""Create, list and revoke API keys, and show their usage."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlencode

from rich.text import Text

from gateway.cli.client import (
    add_gateway_url,
    call_admin,
    plain_table,
    print_json,
    print_output,
    read_admin_text,
)
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
    """Add the commands under `keys`; each sends PACELINE_ADMIN_KEY if it is set."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = commands.add_parser("create", help="create a key; its secret is shown only once")
    create.add_argument("name", help="its owner")
    create.add_argument("--team", help="usage is summed by team")
    create.add_argument("--model", action="append", dest="models", help="allow only this (repeat)")
    create.add_argument("--pool", action="append", dest="pools", help="allow only this (repeat)")
    create.add_argument(
        "--priority", choices=[str(one) for one in Priority], help="the highest one allowed"
    )
    for limit in _LIMITS:
        create.add_argument(f"--{limit.replace('_', '-')}", type=int, metavar="N")
    create.add_argument(
        "--expires-in", type=_duration, metavar="TIME", help="90m, 12h or 30d (default: never)"
    )
    create.set_defaults(command=_create)
    listing = commands.add_parser("list", help="list all keys, without their secrets")
    listing.set_defaults(command=_list)
    revoke = commands.add_parser("revoke", help="revoke a key, and end its running requests")
    revoke.add_argument("id", help="the id that `paceline keys list` shows")
    revoke.set_defaults(command=_revoke)
    usage = commands.add_parser("usage", help="show the usage of keys by day (UTC)")
    usage.add_argument("--from", dest="first", metavar="DAY", help="like 2026-11-01")
    usage.add_argument("--to", dest="last", metavar="DAY", help="like 2026-11-30 (default: today)")
    usage.set_defaults(command=_usage)
    for command in (create, listing, revoke, usage):
        add_gateway_url(command, admin=True)
        forms = command.add_mutually_exclusive_group()
        forms.add_argument("--json", action="store_true", help="print the gateway's response")
        if command is usage:
            forms.add_argument("--csv", action="store_true", help="print CSV")


def run(options: argparse.Namespace) -> int:
    """Run one command of `keys`."""
    answer = options.command(options)
    if options.json:
        print_json(answer)
    return 0


def _create(options: argparse.Namespace) -> Mapping[str, Any]:
    fields = {
        name: getattr(options, name)
        for name in ("name", "team", "models", "pools", "priority", *_LIMITS)
    }
    if options.expires_in is not None:
        fields["expires_at"] = (datetime.now(UTC) + options.expires_in).isoformat()
    body = {name: value for name, value in fields.items() if value is not None}
    key, _ = call_admin(options.url, "POST", _PATH, json=body)
    if not options.json:
        sys.stdout.write(
            f"Created {key['id']} for {key['name']}. The secret is shown only this once:\n\n"
            f"{key['secret']}\n"
        )
    return key


def _list(options: argparse.Namespace) -> Mapping[str, Any]:
    answer, _ = call_admin(options.url, "GET", _PATH)
    if not options.json:
        table = plain_table("Id", "Name", "Team", "Begins", "State", "May use", "Limits")
        for key in answer["keys"]:
            state = Text(key["state"], style=_STATE_STYLES.get(key["state"], ""))
            scope = ", ".join([*key["models"], *key["pools"]]) or "all"
            table.add_row(
                *(key["id"], key["name"], key["team"], key["prefix"], state, scope, _limits(key))
            )
        print_output(table)
    return answer


def _revoke(options: argparse.Namespace) -> Mapping[str, Any]:
    key, _ = call_admin(options.url, "DELETE", f"{_PATH}/{quote(options.id, safe='')}")
    if not options.json:
        sys.stdout.write(f"Revoked {key['id']} of {key['name']}.\n")
    return key


def _usage(options: argparse.Namespace) -> Mapping[str, Any]:
    days = {"from": options.first, "to": options.last}
    query = {name: day for name, day in days.items() if day is not None}
    if options.csv:
        path = f"{_USAGE_PATH}?{urlencode({**query, 'format': 'csv'})}"
        sys.stdout.write(read_admin_text(options.url, path))
        return {}
    answer, _ = call_admin(options.url, "GET", f"{_USAGE_PATH}?{urlencode(query)}")
    if not options.json:
        table = plain_table("Day", "Key", "Name", "Team")
        for column in ("Requests", "Prompt", "Cached", "Completion", "Guessed"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in answer["rows"]:
            table.add_row(*(str(row[column]) for column in _USAGE_COLUMNS))
        print_output(table)
    return answer


def _limits(key: Mapping[str, Any]) -> str:
    """Return the limits of a key in words."""
    limits = [f"{key[name]} {name.replace('_', ' ')}" for name in _LIMITS if key[name] is not None]
    if key["expires_at"] is not None:
        limits.append(f"until {key['expires_at'][:16]}")
    return ", ".join(limits) or "none"


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError("must be like 90m, 12h or 30d")
    return timedelta(seconds=int(match[1]) * _UNITS_S[match[2]])
