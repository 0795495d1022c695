"""Join, list and remove engines of other kinds: LM Studio, Ollama, mlx-lm and so on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rich.text import Text

from gateway.cli import CommandError
from gateway.cli.client import connect, plain_table, print_answer, print_output

_PATH = "/admin/v1/engines"


def join(
    *,
    engine_url: str,
    kind: str,
    engine_id: str | None,
    models: Sequence[str],
    pools: Sequence[str],
    labels: Sequence[str],
    slots: int | None,
    api_key_env: str | None,
    cache_salt: bool,
    url: str,
) -> int:
    """Join an engine, and show the models that the gateway found there."""
    terms: dict[str, Any] = {
        "url": engine_url if "://" in engine_url else f"http://{engine_url}",
        "kind": kind,
        "id": engine_id,
        "models": _names(models),
        "pools": list(pools),
        "labels": list(labels),
        "slots": slots,
        "api_key_env": api_key_env,
        "cache_salt": cache_salt,
    }
    body = {name: value for name, value in terms.items() if value}
    engine = connect(url, admin=True).read("POST", _PATH, json=body)
    lines = [f"Joined {engine['id']} ({engine['kind']}), {engine['slots']} requests at a time:"]
    lines += [
        f"  {model['name']}{'' if model['loaded'] else ' (not in memory)'}"
        for model in engine["models"]
    ]
    if engine["problem"]:
        lines.append(f"It does not get requests yet: {engine['problem']}")
    return print_output("\n".join(lines))


def list_all(*, url: str, as_json: bool) -> int:
    """List all engines."""
    answer = connect(url, admin=True).read("GET", _PATH)
    table = plain_table("Id", "Kind", "URL", "From", "Models", "Pools", "State", numbers=("Slots",))
    for engine in answer["engines"]:
        names = ", ".join(model["name"] for model in engine["models"]) or "-"
        state = Text(engine["problem"] or "ready", style="red" if engine["problem"] else "green")
        table.add_row(
            *(engine["id"], engine["kind"], engine["url"], engine["source"], names),
            *(", ".join(engine["pools"]), state, str(engine["slots"])),
        )
    return print_answer(answer, table, as_json=as_json)


def remove(*, engine_id: str, url: str) -> int:
    """Remove an engine."""
    connect(url, admin=True).send("DELETE", f"{_PATH}/{quote(engine_id, safe='')}")
    return print_output(f"Removed {engine_id}.")


def _names(models: Sequence[str]) -> Mapping[str, str]:
    """Return the names of models at the engine by those for clients."""
    names = {}
    for text in models:
        name, _, there = text.partition("=")
        if not name or (not there and "=" in text):
            raise CommandError(f"'{text}' is not a model, such as NAME or NAME=ENGINE_NAME.")
        names[name] = there or name
    return names
