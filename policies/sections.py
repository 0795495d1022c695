"""The sections of the policy document besides routes: models, pools, prefixes, bounds, metrics."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from paceline.names import Label, Name, OneModel
from paceline.request.content import PICTURES_LIMIT, PIXELS_LIMIT
from paceline.request.fields import FieldError
from paceline.request.profile import Endpoint, RequestProfile

MediaKind = Literal["image", "video", "audio", "file"]
MEDIA_KINDS: Final[tuple[MediaKind, ...]] = get_args(MediaKind)
Text = Annotated[str, Field(min_length=1, max_length=128)]
"""A name from outside the document: a key, a team, the value of a header."""


def as_list(value: object) -> object:
    """Return a single string as a list of one."""
    return [value] if isinstance(value, str) else value


class _OneOrList:
    """The JSON Schema of a list that a single entry may replace."""

    @staticmethod
    def __get_pydantic_json_schema__(
        schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        entries = handler(schema)
        return {"anyOf": [entries["items"], entries]}


Entry = TypeVar("Entry")
OneOrMore = Annotated[
    tuple[Entry, ...], Field(strict=False, min_length=1), BeforeValidator(as_list), _OneOrList
]
"""A list of strings, or one string."""


class Section(BaseModel):
    """A section of the document; it rejects unknown fields and empty values."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _reject_empty(cls, value: Any) -> Any:
        # A condition without a value would match every request.
        if value is None:
            raise PydanticCustomError("empty", "it is empty: set a value or remove the field")
        return value

    @model_serializer(mode="wrap")
    def _without_absent(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit absent fields, because a null in the output would be rejected when it is read."""
        document: dict[str, Any] = handler(self)
        return {name: value for name, value in document.items() if value is not None}


class NonEmptySection(Section):
    """A section that needs at least one field."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    if_empty: ClassVar[str]
    """The message for a section without any field."""

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("no_fields", self.if_empty)
        return self


class PrefixPolicy(Section):
    """The clients that share a cached system prompt, and how long workers are preferred for it."""

    isolation: Literal["key", "team", "none"] = "team"
    """The clients that share cached prompts: with the same key, of the same team, or (none) all.

    A key without a team shares with nobody. A client can detect by the time to the first token that
    another client of its group uses the same prompt.
    """
    ttl_s: float = Field(default=900.0, gt=0)
    """How long a worker is preferred after the last use of the prompt."""
    max_workers: int = Field(default=3, ge=0, le=64)
    """The number of workers that are remembered per prompt; 0 turns prefix affinity off."""

    def scope(self, key: str, team: str, salt: str = "") -> str:
        """Return the isolation scope of a client; requests of different scopes share no prompt.

        `salt` is the field `cache_salt` of the request, which isolates it within that scope.
        """
        scope = f"key:{key}" if key else ""
        if self.isolation == "none":
            scope = ""
        elif self.isolation == "team" and team:
            scope = f"team:{team}"
        return json.dumps([scope, salt]) if salt else scope


Weight = Annotated[float, Field(gt=0, le=1000)]


class PoolWorkers(NonEmptySection):
    """Conditions for the workers of a pool: all given must match; of a list, one is enough."""

    if_empty = "it needs 'labels', 'models' or both"

    labels: OneOrMore[Label] | None = None
    """Labels of workers (`paceline worker --label`)."""
    models: OneOrMore[OneModel] | None = None
    """Models that workers serve; aliases do not count."""


class Queue(Section):
    """The queue of a pool without a free slot."""

    limit: int = Field(default=128, ge=0)
    """The number of requests that may wait; further ones get 503 at once."""
    timeout_s: float = Field(default=60.0, gt=0)
    """How long a request may wait; then it gets 503."""


class Pool(Section):
    """Lanes of all or some workers under one name."""

    lanes: OneOrMore[Name]
    """Names of lanes: text-mtp, vlm, or any other name that a worker uses."""
    workers: PoolWorkers | None = None
    """Restricts the pool to some workers; by default it contains all."""
    weights: dict[Label, Weight] = Field(default_factory=dict)
    """Weights by label: a worker of weight 2 gets twice the requests; the default is 1."""
    slots: int | None = Field(default=None, ge=1)
    """The maximum of concurrent requests in the pool, in addition to the slots of its workers."""
    queue: Queue = Queue()
    """The queue of the pool."""

    def accepts(self, labels: Collection[str], models: Collection[str]) -> bool:
        """Return whether a worker with these labels and models belongs to the pool."""
        chosen = self.workers
        return chosen is None or (
            (chosen.labels is None or any(label in labels for label in chosen.labels))
            and (chosen.models is None or any(model in models for model in chosen.models))
        )

    def usable_slots(self, slots: int) -> int:
        """Return how many of its workers' slots the pool may use."""
        return slots if self.slots is None else min(slots, self.slots)

    def weight(self, labels: Collection[str]) -> float:
        """Return the weight of a worker with these labels; of several, the largest counts."""
        weights = [weight for label, weight in self.weights.items() if label in labels]
        return max(weights, default=1.0)


class ToolRules(Section):
    """The handling of tools that only the servers of OpenAI or Anthropic run."""

    hosted: Literal["ignore", "refuse"] = "ignore"
    """Web search and the like in `/v1/responses` and `/v1/messages`.

    `ignore` leaves such a tool out and names it in `x-paceline-ignored`; `refuse` rejects the
    request.
    """


class Limits(Section):
    """Bounds of one request, in addition to those of the gateway."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of an answer: a larger number is rejected; it is also the default."""
    prompt_chars: int | None = Field(default=None, ge=1)
    """Characters of text in all messages, in the prompt, or in all texts or documents."""
    request_timeout_s: float | None = Field(default=None, gt=0)
    """The time from the complete request to the last byte of the answer; then 504."""


class MediaRules(Section):
    """Bounds of the media in one request."""

    kinds: Annotated[tuple[MediaKind, ...], Field(strict=False)] = MEDIA_KINDS
    """The allowed kinds; an empty list allows only text."""
    pictures: int = Field(default=PICTURES_LIMIT, ge=0, le=PICTURES_LIMIT)
    """The number of pictures in one request."""
    pixels: int = Field(default=PIXELS_LIMIT, ge=1, le=PIXELS_LIMIT)
    """Pixels of all pictures of one request together."""


class Retries(Section):
    """Retries and failover of requests whose worker fails."""

    share: float = Field(default=0.2, ge=0, le=1)
    """The share of all active requests that further attempts may begin at once; others wait."""
    at_least: int = Field(default=3, ge=0)
    """The number that may always begin at once, however few requests are active."""
    per_request: int = Field(default=2, ge=0, le=8)
    """How often a request may continue at another worker after a failure."""


_TEXT_FIELDS = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RERANK: "documents",
}


def apply_limits(profile: RequestProfile, limits: Limits, media: MediaRules) -> RequestProfile:
    """Return the profile with a default `max_tokens`; raise `FieldError` if it exceeds a bound."""
    if profile.media:
        _check_media(profile, media)
    if limits.prompt_chars is not None and profile.text_chars > limits.prompt_chars:
        raise FieldError(
            _TEXT_FIELDS[profile.endpoint],
            f"The text of a request may have at most {limits.prompt_chars} characters.",
        )
    if limits.max_tokens is None:
        return profile
    if profile.max_tokens is None:
        return profile._replace(max_tokens=limits.max_tokens)
    if profile.max_tokens > limits.max_tokens:
        name = dict(profile.spelled).get("max_tokens", "max_tokens")
        raise FieldError(name, f"'{name}' may be at most {limits.max_tokens}.")
    return profile


def _check_media(profile: RequestProfile, media: MediaRules) -> None:
    counts = dict(profile.media)
    for kind in counts:
        if kind not in media.kinds:
            allowed = ", ".join(("text", *media.kinds))
            raise FieldError("messages", f"'{kind}' content is not allowed. Allowed: {allowed}.")
    if counts.get("image", 0) > media.pictures:
        raise FieldError("messages", f"A request may contain at most {media.pictures} pictures.")
    if profile.pixels > media.pixels:
        raise FieldError(
            "messages",
            f"The pictures of a request may have at most {media.pixels} pixels in total.",
        )


class MetricsRules(Section):
    """The responses that contain `metrics`, in vLLM's form."""

    include: Literal["on_request", "with_usage", "always"] = "with_usage"
    """on_request: responses whose request has `"metrics": "summary"`; with_usage: also responses
    that contain usage; always: also the last chunk of every stream."""

    def included_in(self, *, requested: bool, usage: bool) -> bool:
        """Return whether a response contains metrics."""
        return requested or self.include == "always" or (usage and self.include == "with_usage")


class SamplingPolicy(Section):
    """Default values for sampling fields that a request omits.

    A field that is not given has the value of the model's `generation_config.json`, else OpenAI's.
    """

    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 always takes the likeliest token, as speculation requires; OpenAI's value is 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Only the likeliest tokens whose probabilities add up to this share; 1 is all."""
    top_k: int | None = Field(default=None, ge=0)
    """Only this number of the likeliest tokens; 0 is all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Only tokens with at least this share of the highest probability; 0 is all."""

    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Tokens of the prompt and the answer count this much less; 1 changes nothing."""

    def given(self) -> dict[str, float]:
        """Return the values that the policy sets, by field."""
        return {name: value for name, value in self if value is not None}


class ModelPolicy(Section):
    """The aliases of one model, and its defaults for fields that a request omits."""

    aliases: Annotated[tuple[OneModel, ...], Field(strict=False)] = ()
    """Further names for clients, such as gpt-4o-mini."""
    sampling: SamplingPolicy = SamplingPolicy()
    """The default sampling values of this model."""
    exact: bool = False
    """Whether requests that omit `exact` get answers that no other request changes in any bit.

    Such an answer is not drafted for, decodes by itself and takes nothing from the prefix cache.
    """
