"""System prompts in the policy document: who may share one, and where it is looked for.

Pools in the policy document: which lanes of which workers belong together.

Bounds in the policy document: what a request may ask for, bring along, take and repeat.

Metrics in the policy document: which answers tell what drafting did for them.

Models in the policy document: their other names, and what stands in for absent sampling.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from policies.base import NON_EMPTY, Label, Name, Names, Section, as_list
from policies.request.content import PICTURES_LIMIT, PIXELS_LIMIT
from policies.request.fields import FieldError
from policies.request.profile import Endpoint, RequestProfile, SamplingDefaults
from policies.routes import MEDIA_KINDS, MediaKind


class PrefixPolicy(Section):
    """Which requests share what workers keep of a system prompt, and how long workers hold it."""

    isolation: Literal["key", "team", "none"] = "team"
    """Whose requests may share one: those of a key, of a team (a key without one is its own), all.

    Who shares can tell by the time to the first token whether somebody else has the same prompt.
    """
    ttl_s: float = Field(default=900.0, gt=0, allow_inf_nan=False)
    """So long after its last use a worker is taken to hold one."""
    max_workers: int = Field(default=3, ge=0, le=64)
    """Workers that are remembered for one, the last that had it; 0 sends nobody after it."""

    def scope(self, key: str, team: str) -> str:
        """Name those who may share; requests of two scopes never do."""
        if self.isolation == "none":
            return ""
        if self.isolation == "team" and team:
            return f"team:{team}"
        return f"key:{key}" if key else ""


_LARGEST_WEIGHT = 1000
Labels = Annotated[
    tuple[Label, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(
        as_list, json_schema_input_type=Label | Annotated[list[Label], Field(min_length=1)]
    ),
]
Weight = Annotated[float, Field(gt=0, le=_LARGEST_WEIGHT, allow_inf_nan=False)]


class PoolWorkers(Section):
    """Which workers belong to a pool: all that is given must hold; of a list, one is enough."""

    model_config = NON_EMPTY

    labels: Labels | None = None
    """Labels of workers (`paceline worker --label`)."""
    models: Names | None = None
    """Models that workers serve, by their own names."""

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("workers", "it needs 'labels', 'models' or both")
        return self


class Queue(Section):
    """The waiting line in front of a pool whose slots are all taken."""

    limit: int = Field(default=128, ge=0)
    """So many may wait for a slot; more get 503 at once."""
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """So long one may wait; then 503."""


class Pool(Section):
    """The lanes of these names, on all workers or on some, that together make one pool."""

    lanes: Names
    """Lanes of workers: text-mtp, vlm, or whatever else a worker names its lanes."""
    workers: PoolWorkers | None = None
    """Only these workers; without it, all."""
    weights: dict[Label, Weight] = Field(default_factory=dict)
    """By label of workers: one of weight 2 gets twice the share; 1 where nothing is said."""
    slots: int | None = Field(default=None, ge=1)
    """Requests that the whole pool may have at a time, beside the slots of its workers."""
    queue: Queue = Queue()
    """The waiting line in front of the pool."""

    def accepts(self, labels: Collection[str], models: Collection[str]) -> bool:
        """Say whether a worker of these labels and models belongs to the pool."""
        chosen = self.workers
        return chosen is None or (
            (chosen.labels is None or any(label in labels for label in chosen.labels))
            and (chosen.models is None or any(model in models for model in chosen.models))
        )

    def usable_slots(self, slots: int) -> int:
        """Tell how many of its workers' slots the pool may use."""
        return slots if self.slots is None else min(slots, self.slots)

    def weight(self, labels: Collection[str]) -> float:
        """Tell the weight of a worker with these labels: of several, the largest counts."""
        told = [weight for label, weight in self.weights.items() if label in labels]
        return max(told, default=1.0)


class Limits(Section):
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


class MediaRules(Section):
    """What one request may bring along beside text; more is refused before a worker has it."""

    kinds: Annotated[tuple[MediaKind, ...], Field(strict=False)] = MEDIA_KINDS
    """Kinds that are taken; an empty list takes text alone."""
    pictures: int = Field(default=PICTURES_LIMIT, ge=0, le=PICTURES_LIMIT)
    """Pictures of one request."""
    pixels: int = Field(default=PIXELS_LIMIT, ge=1, le=PIXELS_LIMIT)
    """Pixels of all pictures of one request together."""


class Retries(Section):
    """How many requests may be on a further attempt at once."""

    share: float = Field(default=0.2, ge=0, le=1, allow_inf_nan=False)
    """Of all active requests; as in Envoy's retry budget."""
    at_least: int = Field(default=3, ge=0)
    """So many in any case, however few are active."""


def apply_limits(profile: RequestProfile, limits: Limits, media: MediaRules) -> RequestProfile:
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


class MetricsRules(Section):
    """Which answers carry `metrics`, in vLLM's form."""

    include: Literal["on_request", "with_usage", "always"] = "with_usage"
    """To whom: who asks with `"metrics": "summary"`; also wherever usage is told, which is in whole
    answers and in streams that ask for it; or in every answer, streams in their last chunk."""

    def included_in(self, *, asked: bool, usage: bool) -> bool:
        """Say whether an answer carries them to who asked for them, or gets usage."""
        return asked or self.include == "always" or (usage and self.include == "with_usage")


class SamplingPolicy(Section):
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


class ModelPolicy(Section):
    """One model: the other names it answers to, and its sampling defaults."""

    aliases: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Further names under which clients may ask for it, as gpt-4o-mini."""
    sampling: SamplingPolicy = SamplingPolicy()
    """Its own values for sampling fields that a request leaves out."""
