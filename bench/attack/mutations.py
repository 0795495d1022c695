"""Valid documents with a few wrong values: what every attack with bodies draws its inputs from."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

_ADDED = ("x", "", "\0", "url", "type", "id", "content", "__class__", "$ref", "anyOf", "default")


def mutate(
    document: Any,
    chance: Random,
    values: Sequence[Any],
    *,
    changes: Sequence[int] = (0, 1, 1, 2, 3),
) -> None:
    """Change a few values of a document in place, at any depth."""
    for _ in range(chance.choice(changes)):
        parent = document
        while True:
            key: Any = chance.choice(
                list(parent) if isinstance(parent, dict) else range(len(parent))
            )
            child = parent[key]
            if not isinstance(child, dict | list) or not child or chance.random() < 0.2:
                break
            parent = child
        choice = chance.randrange(9)
        if choice == 0:
            del parent[key]
        elif choice == 1 and isinstance(parent, list):
            parent.extend(deepcopy(parent) * chance.choice((1, 1, 40)))
        elif choice == 2 and isinstance(parent, dict):
            parent[chance.choice(_ADDED)] = deepcopy(chance.choice(values))
        else:
            parent[key] = deepcopy(chance.choice(values))
        if not document:
            return
