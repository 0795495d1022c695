"""Policies whose routes are the conditions that a test names."""

from __future__ import annotations

from typing import Any

from policies.document import PolicyDocument, read_policy

DAY = 24 * 60
"""In minutes."""


def policy_with_conditions(*whens: dict[str, Any]) -> PolicyDocument:
    """A policy with a route for each condition, and one that takes the rest."""
    routes = [
        {"name": f"route-{index}", "when": when, "to": ["vlm"]} for index, when in enumerate(whens)
    ]
    return read_policy(
        {
            "version": 1,
            "routes": [*routes, {"name": "rest", "to": ["vlm"]}],
            "pools": {"vlm": {"lanes": ["vlm"]}},
        },
        "test",
    )
