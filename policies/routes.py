"""Routes of the policy document: conditions, and pools for matching requests."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.names import Name, OneModel
from policies.sections import (
    MEDIA_KINDS,
    MediaKind,
    NonEmptySection,
    OneOrMore,
    Section,
    Text,
    as_list,
)

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
EndpointName = Literal["chat", "completions", "embeddings", "rerank"]
DAYS: Final[tuple[Day, ...]] = get_args(Day)
MINUTES_OF_WEEK: Final = 7 * 24 * 60

_MINUTES_OF_DAY = 24 * 60
_HOURS = r"^([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"
# A condition on these headers would put a secret into a document that many may read.
_SECRET_HEADERS = frozenset(("authorization", "proxy-authorization", "cookie", "x-api-key"))


def _read_media(value: Any, _read: ValidatorFunctionWrapHandler) -> bool | tuple[MediaKind, ...]:
    # One validator, because a union reports an error for each of its members.
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
        raise PydanticCustomError("hours", "it must have the form 22:00-06:00")
    if len(set(value.split("-"))) == 1:
        raise PydanticCustomError("hours", "it begins and ends in the same minute")
    return value


def _reject_secret(value: str) -> str:
    if value in _SECRET_HEADERS:
        raise PydanticCustomError("secret", "this header contains a secret; use 'key' or 'team'")
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
HeaderName = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$"), AfterValidator(_reject_secret)
]


class Range(NonEmptySection):
    """A range of numbers; both bounds are included, and one may be omitted."""

    if_empty = "it needs 'at_least', 'at_most' or both"

    at_least: int | None = Field(default=None, ge=0)
    """The lower bound, included."""
    at_most: int | None = Field(default=None, ge=0)
    """The upper bound, included."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise PydanticCustomError("range", "'at_least' is greater than 'at_most'")
        return self


class Features(NonEmptySection):
    """Features that a request uses (true) or does not use (false)."""

    if_empty = "it needs at least one feature"

    tools: bool | None = None
    """The request contains functions that the model may call."""
    structured_output: bool | None = None
    """The answer must be JSON, or follow a schema, a pattern or a grammar."""
    logprobs: bool | None = None
    """The request asks for log-probabilities of tokens."""
    multiple_choices: bool | None = None
    """The request asks for more than one answer (`n`)."""
    logits_processors: bool | None = None
    """Penalties or a `logit_bias` change the scores of tokens."""
    thinking_budget: bool | None = None
    """The request limits the tokens for thinking."""


class When(Section):
    """The conditions of a route: all given must match; of a list, one is enough."""

    endpoint: OneOrMore[EndpointName] | None = None
    """The endpoint of the request; Messages and Responses are chats."""
    media: Media | None = None
    """Whether the request contains media, or the kinds that match."""
    mtp_eligible: bool | None = None
    """Whether the request may run in the speculative lane."""
    greedy: bool | None = None
    """Whether the engine always takes the likeliest token (temperature 0, or top_k 1)."""
    stream: bool | None = None
    """Whether the response is a stream."""
    features: Features | None = None
    """Features that the request uses or does not use; all given must match."""
    prompt_chars: Range | None = None
    """Characters of text in all messages, in the prompt, or in all texts or documents."""
    max_tokens: Range | None = None
    """Tokens that the answer may have; a request without a limit exceeds every number."""
    messages: Range | None = None
    """Messages of the conversation; a plain prompt counts as one."""
    model: OneOrMore[OneModel] | None = None
    """The name of the model; aliases do not count."""
    key: OneOrMore[Text] | None = None
    """The id of the API key, never its secret."""
    team: OneOrMore[Text] | None = None
    """The team of the API key."""
    header: Annotated[dict[HeaderName, OneOrMore[Text]], Field(min_length=1)] | None = None
    """Values of request headers, names in lower case; all given must match."""
    hours: Hours | None = None
    """Local time of the gateway, such as 22:00-06:00; the end is excluded."""
    days: OneOrMore[Day] | None = None
    """Days of the week; hours past midnight belong to the day when they begin."""

    @property
    def times(self) -> tuple[tuple[int, ...], int] | None:
        """The minutes of the week at which a match begins, and its length; None: always."""
        if self.hours is None and self.days is None:
            return None
        hours = re.split("[:-]", self.hours or "00:00-24:00")
        first, end = (60 * int(hours[at]) + int(hours[at + 1]) for at in (0, 2))
        begins = tuple(DAYS.index(day) * _MINUTES_OF_DAY + first for day in self.days or DAYS)
        return begins, (end - first) % _MINUTES_OF_DAY or _MINUTES_OF_DAY


class Spill(Section):
    """The wait after which a request may use the later pools of its route."""

    after_wait_ms: int = Field(ge=0)
    """Milliseconds until the later pools may take the request too; 0 means at once."""


class Route(Section):
    """Conditions, and the pools of the requests that match them."""

    name: Name
    """The name in /v1/status, in explanations and in metrics."""
    when: When = When()
    """The conditions; a route without conditions matches every request and must be the last."""
    to: OneOrMore[Name]
    """Pools in order of preference."""
    spill: Spill | None = None
    """By default a later pool is used only if no worker of the earlier ones serves the model."""
