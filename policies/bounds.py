"""Bounds in the policy document: what a request may ask for, bring along, take and repeat."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.base import Part
from policies.request.content import PICTURES_LIMIT, PIXELS_LIMIT
from policies.request.fields import FieldError
from policies.request.profile import Endpoint, RequestProfile
from policies.routes import MEDIA_KINDS, MediaKind


class Limits(Part):
    """What one request may ask for and take; what is not given is left to the gateway."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of an answer: more is refused, and a request that names no number gets this one."""
    prompt_chars: int | None = Field(default=None, ge=1)
    """Characters of text in all messages, or in the prompt; more is refused."""
    request_timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """From the whole body to the last byte of the answer; then 504."""

    def request_time_s(self, most_s: float) -> float:
        """Tell the time that a request may take, which is never more than `most_s`."""
        return most_s if self.request_timeout_s is None else min(self.request_timeout_s, most_s)


class MediaRules(Part):
    """What one request may bring along beside text; more is refused before a worker has it."""

    kinds: Annotated[tuple[MediaKind, ...], Field(strict=False)] = MEDIA_KINDS
    """Kinds that are taken; an empty list takes text alone."""
    pictures: int = Field(default=PICTURES_LIMIT, ge=0, le=PICTURES_LIMIT)
    """Pictures of one request."""
    pixels: int = Field(default=PIXELS_LIMIT, ge=1, le=PIXELS_LIMIT)
    """Pixels of all pictures of one request together."""


class Retries(Part):
    """How many requests may be on a further attempt at once."""

    share: float = Field(default=0.2, ge=0, le=1, allow_inf_nan=False)
    """Of all active requests; as in Envoy's retry budget."""
    at_least: int = Field(default=3, ge=0)
    """So many in any case, however few are active."""


def bounded(profile: RequestProfile, limits: Limits, media: MediaRules) -> RequestProfile:
    """Return the profile with what the limits add; raise `FieldError` for what exceeds them."""
    if profile.media:
        _check_media(profile, media)
    if limits.prompt_chars is not None and profile.text_chars > limits.prompt_chars:
        raise FieldError(
            "prompt" if profile.endpoint is Endpoint.COMPLETIONS else "messages",
            f"The text of a request may have at most {limits.prompt_chars} characters here.",
        )
    if limits.max_tokens is None:
        return profile
    if profile.max_tokens is None:
        return profile._replace(max_tokens=limits.max_tokens)
    if profile.max_tokens > limits.max_tokens:
        raise FieldError("max_tokens", f"'max_tokens' may be at most {limits.max_tokens} here.")
    return profile


def _check_media(profile: RequestProfile, media: MediaRules) -> None:
    counts = dict(profile.media)
    for kind in counts:
        if kind not in media.kinds:
            taken = ", ".join(("text", *media.kinds))
            raise FieldError("messages", f"'{kind}' content is not taken here, only: {taken}.")
    if counts.get("image", 0) > media.pictures:
        raise FieldError("messages", f"A request may hold at most {media.pictures} pictures here.")
    if profile.pixels > media.pixels:
        raise FieldError(
            "messages",
            f"The pictures of a request may have at most {media.pixels} pixels in all here.",
        )
