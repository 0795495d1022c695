"""Create, list and revoke API keys, and show their usage."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from gateway.cli.client import add_admin_commands, plain_table, print_json, print_output
from policies.document import Priority

_PATH = "/admin/v1/keys"
_USAGE_PATH = "/admin/v1/usage"
_USAGE_COLUMNS = (
    *("day", "key", "name", "team", "requests"),
    *("prompt_tokens", "cached_tokens", "completion_tokens", "guessed_tokens"),
)
_LIMITS = ("requests_a_minute", "tokens_a_minute", "concurrent_requests", "tokens_a_day")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_STATE_STYLES = {"active": "green", "expired": "yellow", "revoked": "red"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the commands under `keys`; each sends the admin key."""
    create, listing, revoke, usage = add_admin_commands(
        parser,
        {
            _create: ("create", "create a key; its secret is shown only once"),
            _list: ("list", "list all keys, without their secrets"),
            _revoke: ("revoke", "revoke a key, and end its running requests"),
            _usage: ("usage", "show the usage of keys by day (UTC)"),
        },
    )
    create.add_argument("name", help="its owner")
    create.add_argument("--team", help="usage is summed by team")
    create.add_argument("--model", action="append", dest="models", help="allow only this (repeat)")
    create.add_argument("--pool", action="append", dest="pools", help="allow only this (repeat)")
    create.add_argument(
        "--priority", choices=[str(one) for one in Priority], help="the highest one allowed"
    )
    for limit in _LIMITS:
        create.add_argument(f"--{limit.replace('_', '-')}", type=int, metavar="N")
    lifetime = "90m, 12h or 30d (default: never)"
    create.add_argument(
        "--expires-in", dest="expires_at", type=_expiry, metavar="TIME", help=lifetime
    )
    revoke.add_argument("id", help="the id that `paceline keys list` shows")
    usage.add_argument("--from", dest="first", metavar="DAY", help="like 2026-11-01")
    usage.add_argument("--to", dest="last", metavar="DAY", help="like 2026-11-30 (default: today)")
    for command in (create, listing, revoke, usage):
        forms = command.add_mutually_exclusive_group()
        forms.add_argument("--json", action="store_true", help="print the gateway's response")
        if command is usage:
            forms.add_argument("--csv", action="store_true", help="print CSV")


def _create(options: argparse.Namespace) -> int:
    fields = ("name", "team", "models", "pools", "priority", "expires_at", *_LIMITS)
    given = vars(options)
    body = {name: given[name] for name in fields if given[name] is not None}
    key = options.gateway.read("POST", _PATH, json=body)
    return _print(
        options,
        key,
        f"Created {key['id']} for {key['name']}. The secret is shown only this once:\n\n"
        f"{key['secret']}",
    )


def _list(options: argparse.Namespace) -> int:
    answer = options.gateway.read("GET", _PATH)
    table = plain_table("Id", "Name", "Team", "Begins", "State", "May use", "Limits")
    for key in answer["keys"]:
        state = Text(key["state"], style=_STATE_STYLES.get(key["state"], ""))
        scope = ", ".join([*key["models"], *key["pools"]]) or "all"
        table.add_row(
            *(key["id"], key["name"], key["team"], key["prefix"], state, scope, _limits(key))
        )
    return _print(options, answer, table)


def _revoke(options: argparse.Namespace) -> int:
    key = options.gateway.read("DELETE", f"{_PATH}/{quote(options.id, safe='')}")
    return _print(options, key, f"Revoked {key['id']} of {key['name']}.")


def _usage(options: argparse.Namespace) -> int:
    days = {"from": options.first, "to": options.last}
    query = {name: day for name, day in days.items() if day is not None}
    if options.csv:
        response = options.gateway.send("GET", _USAGE_PATH, params={**query, "format": "csv"})
        sys.stdout.write(response.text)
        return 0
    answer = options.gateway.read("GET", _USAGE_PATH, params=query)
    numbers = ("Requests", "Prompt", "Cached", "Completion", "Guessed")
    table = plain_table("Day", "Key", "Name", "Team", numbers=numbers)
    for row in answer["rows"]:
        table.add_row(*(str(row[column]) for column in _USAGE_COLUMNS))
    return _print(options, answer, table)


def _print(options: argparse.Namespace, answer: Mapping[str, Any], shown: str | Table) -> int:
    """Print the gateway's answer with `--json`, else its form for a terminal."""
    if options.json:
        print_json(answer)
    else:
        print_output(Text(shown) if isinstance(shown, str) else shown)
    return 0


def _limits(key: Mapping[str, Any]) -> str:
    """Return the limits of a key in words."""
    limits = [f"{key[name]} {name.replace('_', ' ')}" for name in _LIMITS if key[name] is not None]
    if key["expires_at"] is not None:
        limits.append(f"until {key['expires_at'][:16]}")
    return ", ".join(limits) or "none"


def _expiry(text: str) -> str:
    """Return the time at which a duration from now ends."""
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError("must be like 90m, 12h or 30d")
    return (datetime.now(UTC) + timedelta(**{_UNITS[match[2]]: int(match[1])})).isoformat()
