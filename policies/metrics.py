"""Metrics in the policy document: which answers tell what drafting did for them."""

from __future__ import annotations

from typing import Literal

from policies.base import Part


class MetricsRules(Part):
    """Which answers carry `metrics`, in vLLM's form."""

    told: Literal["asked", "with_usage", "always"] = "with_usage"
    """To whom: who asks with `"metrics": "summary"`; also wherever usage is told, which is in whole
    answers and in streams that ask for it; or in every answer, streams in their last chunk."""

    def tells(self, *, asked: bool, usage: bool) -> bool:
        """Say whether an answer carries them to who asked for them, or gets usage."""
        return asked or self.told == "always" or (usage and self.told == "with_usage")
