"""Prefix claims of two workers."""

from __future__ import annotations

from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.view import FleetView
from policies.sections import PrefixPolicy

RULES = PrefixPolicy()
STUDIO, LAPTOP = ("studio", "1"), ("laptop", "1")
"""Two workers, each with the id of its boot."""


def prefix_holders(prefixes: PrefixIndex, name: str = "p") -> set[tuple[str, str]]:
    """Return the workers and boots with a claim for a system prompt."""
    return set(prefixes.annotate(FleetView.of((), frozenset()), name).prefix_boots)
