"""Models in the policy document: their other names, and what stands in for absent sampling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.base import Name, Part
from policies.request.profile import SamplingDefaults


class SamplingPolicy(Part):
    """What stands in for a sampling field that a request leaves out."""

    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    """0 takes the likeliest token each time, which is what speculation needs."""
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    """Only the likeliest tokens that make up this share together; 1 is all."""
    top_k: int = Field(default=0, ge=0)
    """Only so many of the likeliest tokens; 0 is all."""
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Only tokens at least this share as likely as the likeliest; 0 is all."""

    @property
    def defaults(self) -> SamplingDefaults:
        """These values as the record that the reading of a body takes."""
        return SamplingDefaults(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p
        )


class ModelPolicy(Part):
    """One model: the other names it answers to, and its sampling defaults."""

    aliases: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Further names under which clients may ask for it, as gpt-4o-mini."""
    sampling: SamplingPolicy = SamplingPolicy()
    """Its own values for sampling fields that a request leaves out."""
