"""System prompts in the policy document: who may share one, and where it is looked for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from policies.base import Part


class PrefixPolicy(Part):
    """Which requests share what workers keep of a system prompt, and how long workers hold it."""

    isolation: Literal["key", "team", "none"] = "team"
    """Whose requests may share one: those of a key, of a team (a key without one is its own), all.

    Who shares can tell by the time to the first token whether somebody else has the same prompt.
    """
    ttl_s: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """So long after its last use a worker is taken to hold one."""
    holders: int = Field(default=3, ge=0, le=64)
    """Workers that are remembered for one, the last that had it; 0 sends nobody after it."""

    def scope(self, key: str, team: str) -> str:
        """Name those who may share; requests of two scopes never do."""
        if self.isolation == "none":
            return ""
        if self.isolation == "team" and team:
            return f"team:{team}"
        return f"key:{key}" if key else ""
