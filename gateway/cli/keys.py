"""Create, change, list and revoke API keys, and show their usage."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
from rich.text import Text

from gateway.cli import CommandError
from gateway.cli.client import (
    Gateway,
    connect,
    local_time,
    plain_table,
    print_answer,
    print_output,
)

_PATH = "/admin/v1/keys"
_USAGE_PATH = "/admin/v1/usage"
_USAGE_COLUMNS = (
    *("day", "key", "name", "team", "requests"),
    *("prompt_tokens", "cached", "completion_tokens", "guessed_tokens"),
)
_LIMITS = ("requests_a_minute", "tokens_a_minute", "concurrent_requests", "tokens_a_day")
_FIRST_KEY = "All clients need a key from now on; this cannot be undone."
_STATE_STYLES = {"active": "green", "expired": "yellow", "revoked": "red"}


def create(
    *, url: str, as_json: bool, yes: bool, limits: Sequence[tuple[str, int]], **terms: Any
) -> int:
    """Create a key with the given terms; the first one needs a confirmation."""
    body = {name: value for name, value in terms.items() if value not in (None, ())} | dict(limits)
    gateway = connect(url, admin=True)
    if not gateway.read("GET", _PATH)["required"]:
        sys.stderr.write(f"This is the first key. {_FIRST_KEY}\n")
        if not (yes or sys.stdin.isatty()):
            raise CommandError("no key was created; without a terminal, --yes confirms the first.")
        if not (yes or click.confirm("Create it?", err=True)):
            raise CommandError("no key was created.")
    return _print_secret("Created", gateway.read("POST", _PATH, json=body), as_json=as_json)


def edit(
    *, key: str, clear: Sequence[str], url: str, limits: Sequence[tuple[str, int]], **terms: Any
) -> int:
    """Change terms of a key, and set others to their defaults."""
    body = {name: value for name, value in terms.items() if value not in (None, ())} | dict(limits)
    if both := sorted({*clear} & body.keys()):
        raise CommandError(f"{both[0]} cannot be both set and cleared.")
    if not (body or clear):
        raise CommandError("nothing to change; `paceline keys edit --help` lists the options.")
    gateway = connect(url, admin=True)
    changed = gateway.read("PATCH", _place(gateway, key), json=body | dict.fromkeys(clear))
    _warn(changed)
    scope = ", ".join([*changed["models"], *changed["pools"]]) or "all"
    what = f"may use {scope}; limits: {_limits(changed)}"
    return print_output(f"Changed {changed['id']} of {changed['name']}: {what}.")


def rotate(*, key: str, url: str, as_json: bool) -> int:
    """Give a key a new secret; the old one is refused from now on."""
    gateway = connect(url, admin=True)
    rotated = gateway.read("POST", f"{_place(gateway, key)}/rotate")
    return _print_secret("Rotated", rotated, as_json=as_json)


def list_all(*, url: str, as_json: bool) -> int:
    """List all keys."""
    answer = connect(url, admin=True).read("GET", _PATH)
    table = plain_table("Id", "Name", "Team", "Begins", "State", "May use", "Limits")
    for key in answer["keys"]:
        state = Text(key["state"], style=_STATE_STYLES.get(key["state"], ""))
        if key["refused"]:
            used = f"; used {key['refused']} times since, from {key['refused_from']}"
            state.append(f"{used} at {local_time(key['refused_at'])}", style="red")
        scope = ", ".join([*key["models"], *key["pools"]]) or "all"
        table.add_row(
            *(key["id"], key["name"], key["team"], key["prefix"], state, scope, _limits(key))
        )
    return print_answer(answer, table, as_json=as_json)


def revoke(*, key: str, url: str) -> int:
    """Revoke a key."""
    gateway = connect(url, admin=True)
    revoked = gateway.read("DELETE", _place(gateway, key))
    return print_output(f"Revoked {revoked['id']} of {revoked['name']}.")


def _place(gateway: Gateway, key: str) -> str:
    """Return the path of a key by its id, or by its name if only one active key has it."""
    known = gateway.read("GET", _PATH)["keys"]
    named = [one for one in known if one["name"].casefold() == key.casefold()]
    active = [one["id"] for one in named if one["state"] == "active"]
    if len(active) > 1:
        raise CommandError(f"the keys {', '.join(active)} have the name {key}; use the id of one.")
    ended = [one["id"] for one in named][-1:]
    found = key if key in (one["id"] for one in known) else next(iter(active or ended), key)
    return f"{_PATH}/{quote(found, safe='')}"


def _print_secret(done: str, key: Mapping[str, Any], *, as_json: bool) -> int:
    _warn(key)
    shown = f"{done} {key['id']} for {key['name']}. The secret is shown only this once:"
    return print_answer(key, f"{shown}\n\n{key['secret']}", as_json=as_json)


def _warn(key: Mapping[str, Any]) -> None:
    for warning in key["warnings"]:
        sys.stderr.write(f"Warning: {warning}\n")


def usage(*, first: str | None, last: str | None, url: str, as_csv: bool, as_json: bool) -> int:
    """Show the usage of keys by day."""
    gateway = connect(url, admin=True)
    days = {"from": first, "to": last}
    query = {name: day for name, day in days.items() if day is not None}
    if as_csv:
        response = gateway.send("GET", _USAGE_PATH, params={**query, "format": "csv"})
        sys.stdout.write(response.text)
        return 0
    answer = gateway.read("GET", _USAGE_PATH, params=query)
    numbers = ("Requests", "Prompt", "Cached", "Completion", "Estimated")
    table = plain_table("Day", "Key", "Name", "Team", numbers=numbers)
    for row in answer["rows"]:
        name = row["name"] or ("" if row["key"] else "without a key")
        named = {**row, "name": name, "cached": _cached(row)}
        table.add_row(*(str(named[column]) for column in _USAGE_COLUMNS))
    return print_answer(answer, table, as_json=as_json)


def _cached(row: Mapping[str, Any]) -> str:
    """Return the cached tokens, marked if some requests or all left them unknown."""
    unknown = row["cached_unknown_requests"]
    if unknown and unknown == row["requests"]:
        return "unknown"
    return f"{'at least ' if unknown else ''}{row['cached_tokens']}"


def _limits(key: Mapping[str, Any]) -> str:
    """Return the limits of a key in words."""
    limits = [f"{key[name]} {name.replace('_', ' ')}" for name in _LIMITS if key[name] is not None]
    if key["expires_at"] is not None:
        limits.append(f"until {local_time(key['expires_at'])}")
    return ", ".join(limits) or "none"
