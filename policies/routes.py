"""Routes in the policy document: which requests each takes, and where those go."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from policies.base import NON_EMPTY, Name, Names, Section, Texts, as_list

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
MediaKind = Literal["image", "video", "audio", "file"]
DAYS: Final[tuple[Day, ...]] = get_args(Day)
MEDIA_KINDS: Final[tuple[MediaKind, ...]] = get_args(MediaKind)
MINUTES_OF_WEEK: Final = 7 * 24 * 60

_MINUTES_OF_DAY = 24 * 60
_HOURS = r"^([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"
# Whoever routes by these would write a secret into a document that many may read.
_SECRET_HEADERS = frozenset(("authorization", "proxy-authorization", "cookie", "x-api-key"))


def _read_media(value: Any, _read: ValidatorFunctionWrapHandler) -> bool | tuple[MediaKind, ...]:
    # In one go, since a union would tell of each of its sides what is wrong.
    if isinstance(value, bool):
        return value
    kinds = as_list(value)
    if isinstance(kinds, list | tuple) and kinds and all(kind in MEDIA_KINDS for kind in kinds):
        return tuple(kinds)
    raise PydanticCustomError(
        "media", "it must be true, false, or some of: {kinds}", {"kinds": ", ".join(MEDIA_KINDS)}
    )


def _read_hours(value: Any) -> str:
    if not isinstance(value, str) or not re.match(_HOURS, value):
        raise PydanticCustomError("hours", "it must be like 22:00-06:00")
    if len(set(value.split("-"))) == 1:
        raise PydanticCustomError("hours", "it begins and ends at the same minute")
    return value


def _no_secret(value: str) -> str:
    if value in _SECRET_HEADERS:
        raise PydanticCustomError("secret", "it holds secrets; use 'key' or 'team'")
    return value


Media = Annotated[
    bool | tuple[MediaKind, ...],
    WrapValidator(
        _read_media,
        json_schema_input_type=bool | MediaKind | Annotated[list[MediaKind], Field(min_length=1)],
    ),
]
Hours = Annotated[
    str,
    PlainValidator(_read_hours, json_schema_input_type=Annotated[str, Field(pattern=_HOURS)]),
]
Days = Annotated[
    tuple[Day, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(
        as_list, json_schema_input_type=Day | Annotated[list[Day], Field(min_length=1)]
    ),
]
HeaderName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$"), AfterValidator(_no_secret)]


class Range(Section):
    """Numbers between two bounds, both included; one of them may be left out."""

    model_config = NON_EMPTY

    at_least: int | None = Field(default=None, ge=0)
    """The smallest number that is in the range."""
    at_most: int | None = Field(default=None, ge=0)
    """The largest number that is in the range."""

    @model_validator(mode="after")
    def _holds_numbers(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise PydanticCustomError("range", "it needs 'at_least', 'at_most' or both")
        if None not in (self.at_least, self.at_most) and not self.contains(self.at_least or 0):
            raise PydanticCustomError("range", "no number is in it")
        return self

    def contains(self, number: float) -> bool:
        """Say whether a number is in the range."""
        return (self.at_least is None or self.at_least <= number) and (
            self.at_most is None or number <= self.at_most
        )


class Features(Section):
    """What a request uses, or does not use, beyond plain text."""

    model_config = NON_EMPTY

    tools: bool | None = None
    """Functions that the model may call come along."""
    structured_output: bool | None = None
    """The answer must be JSON, or follow a schema, a pattern or a grammar."""
    logprobs: bool | None = None
    """Log-probabilities of tokens are asked for."""
    multiple_choices: bool | None = None
    """More than one answer is asked for (`n`)."""
    logits_processors: bool | None = None
    """Penalties or a `logit_bias` change the scores of tokens."""
    thinking_budget: bool | None = None
    """The tokens for thinking are limited."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("features", "it needs at least one feature")
        return self


class When(Section):
    """Conditions of a route: all that are given must hold; of a list, one is enough."""

    media: Media | None = None
    """Whether pictures, sound, video or files come along; or the kinds of which one must."""
    mtp_eligible: bool | None = None
    """Whether nothing about the request keeps it out of the speculative lane."""
    greedy: bool | None = None
    """Whether the likeliest token is taken each time (temperature 0, or top_k 1)."""
    stream: bool | None = None
    """Whether the answer is streamed."""
    features: Features | None = None
    """What the request uses, or does not use; all that are given must hold."""
    prompt_chars: Range | None = None
    """Characters of text in all messages, or in the prompt."""
    max_tokens: Range | None = None
    """Tokens that the answer may have; a request without a limit is above every number."""
    messages: Range | None = None
    """Messages of the conversation; a plain prompt is one."""
    model: Names | None = None
    """The model by its own name, not an alias."""
    key: Texts | None = None
    """The id of the key that is used, never the secret itself."""
    team: Texts | None = None
    """The team of the key that is used."""
    header: Annotated[dict[HeaderName, Texts], Field(min_length=1)] | None = None
    """Values of request headers, names in lower case; all that are named must match."""
    hours: Hours | None = None
    """Local time of the gateway, as 22:00-06:00; the end is not included."""
    days: Days | None = None
    """Days of the week; hours that pass midnight belong to the day on which they begin."""

    def windows(self) -> tuple[tuple[int, int], ...] | None:
        """List the minutes of the week in which it holds, as (first, end); None is always."""
        if self.hours is None and self.days is None:
            return None
        first, end = map(_minute, (self.hours or "00:00-24:00").split("-"))
        length = (end - first) % _MINUTES_OF_DAY or _MINUTES_OF_DAY
        found = []
        for day in dict.fromkeys(self.days or DAYS):
            begins = DAYS.index(day) * _MINUTES_OF_DAY + first
            ends = begins + length
            found.append((begins, min(ends, MINUTES_OF_WEEK)))
            if ends > MINUTES_OF_WEEK:  # from Sunday into Monday
                found.append((0, ends - MINUTES_OF_WEEK))
        return tuple(found)


class Spill(Section):
    """When a request stops waiting for its preferred pool alone."""

    after_wait_ms: int = Field(ge=0)
    """From then on the later pools of the route may take it too; 0 is at once."""


class Route(Section):
    """Where requests go for which `when` holds."""

    name: Name
    """Shown in /v1/status, in explanations and in counts."""
    when: When = When()
    """All conditions must hold; without any it takes every request, so it stands last."""
    to: Names
    """Pools in order of preference."""
    spill: Spill | None = None
    """Without it, later pools are for when nobody in the first serves the model, however full."""


def _minute(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)
