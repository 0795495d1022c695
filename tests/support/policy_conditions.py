"""Policies with given conditions as their routes."""

from __future__ import annotations

from typing import Any

from policies.document import PolicyDocument, read_policy

DAY = 24 * 60
"""One day in minutes."""


def policy_with_conditions(*conditions: dict[str, Any]) -> PolicyDocument:
    """Return a policy with a route for each condition, and a last route for the rest."""
    routes = [
        {"name": f"route-{index}", "when": condition, "to": ["vlm"]}
        for index, condition in enumerate(conditions)
    ]
    return read_policy(
        {
            "version": 1,
            "routes": [*routes, {"name": "rest", "to": ["vlm"]}],
            "pools": {"vlm": {"lanes": ["vlm"]}},
        },
        "test",
    )
