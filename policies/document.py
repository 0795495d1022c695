"""The policy document: what may stand in it, and errors that name file, line and field."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from policies.profile import SamplingDefaults
from policies.written import TextInvalid, line_of, read_yaml

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
SHIPPED = "default.yaml"
Place = tuple[str | int, ...]
"""Steps from the top of a document: names of fields and numbers of entries."""


class Problem(NamedTuple):
    """One reason why a document cannot be used."""

    field: str
    """As routes.0.when.media; empty where it is the document as a whole."""
    sentence: str
    line: int | None = None
    """Where it stands, in a document that was read from text."""


class PolicyInvalid(ValueError):
    """A policy cannot be used; `problems` holds every reason."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        told = []
        for field, sentence, line in problems:
            where = (f"line {line}" if line else "", field)
            told.append(": ".join(part for part in (*where, sentence) if part))
        super().__init__(f"The policy {source} is not usable: " + "; ".join(told))
        self.source = source
        self.problems = problems


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Priority(StrEnum):
    """How a request stands in a waiting line."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BULK = "bulk"


class SamplingPolicy(_Part):
    """What stands in for a sampling field that a request leaves out."""

    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)

    @property
    def defaults(self) -> SamplingDefaults:
        """These values as the record that the reading of a body takes."""
        return SamplingDefaults(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p
        )


class ModelPolicy(_Part):
    """One model: the other names it answers to, and its sampling defaults."""

    aliases: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    sampling: SamplingPolicy = SamplingPolicy()


class When(_Part):
    """Conditions of a route; all that are given must hold."""

    media: bool | None = None
    """Pictures, sound, video or files come along."""
    mtp_eligible: bool | None = None
    """Nothing about the request keeps it out of the speculative lane."""
    model: Name | None = None
    """The model by its own name, not an alias."""
    greedy: bool | None = None
    """The likeliest token is taken each time."""
    stream: bool | None = None


class Spill(_Part):
    """When a request stops waiting for its preferred pool alone."""

    after_wait_ms: int = Field(ge=0)


class Route(_Part):
    """Where requests go for which `when` holds: pools in order of preference."""

    name: Name
    when: When = When()
    to: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
    spill: Spill | None = None
    """None: later pools are for when nobody in the first can take the request, however full."""


class Queue(_Part):
    """The waiting line in front of a pool whose slots are all taken."""

    limit: int = Field(default=128, ge=0)
    timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)


class Pool(_Part):
    """The lanes of all workers that together make one pool."""

    lanes: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)]
    queue: Queue = Queue()


class PolicyDocument(_Part):
    """The whole routing policy; checked for sense, not only for shape."""

    version: Literal[1]
    models: dict[Name, ModelPolicy] = Field(default_factory=dict)
    routes: Annotated[tuple[Route, ...], Field(strict=False, min_length=1)]
    pools: dict[Name, Pool] = Field(min_length=1)
    priorities: Annotated[
        tuple[Annotated[Priority, Field(strict=False)], ...], Field(strict=False)
    ] = tuple(Priority)
    """Those that a client may ask for by header."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        problems = [
            InitErrorDetails(
                type=PydanticCustomError("sense", "{what}", {"what": what}), loc=place, input=None
            )
            for place, what in (*self._alias_problems(), *self._route_problems())
        ]
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    def _alias_problems(self) -> Iterator[tuple[Place, str]]:
        owners: dict[str, str] = {}
        for model, entry in self.models.items():
            for index, alias in enumerate(entry.aliases):
                place = ("models", model, "aliases", index)
                if alias in self.models:
                    yield place, f"'{alias}' is a model of its own"
                elif alias in owners:
                    yield place, f"'{alias}' already means '{owners[alias]}'"
                owners.setdefault(alias, model)

    def _route_problems(self) -> Iterator[tuple[Place, str]]:
        names = [route.name for route in self.routes]
        aliases = {alias for entry in self.models.values() for alias in entry.aliases}
        for index, route in enumerate(self.routes):
            at = ("routes", index)
            if route.name in names[:index]:
                yield (*at, "name"), f"'{route.name}' is used twice"
            for number, pool in enumerate(route.to):
                if pool not in self.pools:
                    yield (*at, "to", number), f"there is no pool '{pool}'"
            if route.spill is not None and len(route.to) == 1:
                yield (*at, "spill"), "there is no second pool to spill to"
            if route.when.model in aliases:
                yield (*at, "when", "model"), f"'{route.when.model}' is an alias"
            always = route.when == When()
            if always and index < len(self.routes) - 1:
                yield at, "it takes every request, so no later route is reached"
            if not always and index == len(self.routes) - 1:
                yield (*at, "when"), "the last route must take every request"


def read_policy(document: Any, source: str) -> PolicyDocument:
    """Check a parsed document; raise `PolicyInvalid` naming every wrong field."""
    if not isinstance(document, dict):
        raise PolicyInvalid(source, (Problem("", "it must be a mapping"),))
    try:
        return PolicyDocument.model_validate(document)
    except ValidationError as invalid:
        problems = tuple(
            Problem(
                ".".join(str(part) for part in error["loc"]), _plain(error["type"], error["msg"])
            )
            for error in invalid.errors(include_url=False, include_input=False)
        )
        raise PolicyInvalid(source, problems) from None


def parse_policy(text: str, source: str) -> PolicyDocument:
    """Read a policy from text (YAML, so also JSON); raise `PolicyInvalid` with lines."""
    try:
        return read_policy(read_yaml(text), source)
    except TextInvalid as invalid:
        problems = [Problem("", invalid.what, invalid.line)]
    except PolicyInvalid as invalid:
        problems = [one._replace(line=line_of(text, one.field)) for one in invalid.problems]
    raise PolicyInvalid(source, tuple(sorted(problems, key=lambda one: one.line or 0)))


def load_policy(path: Path) -> PolicyDocument:
    """Read a policy file; raise `PolicyInvalid`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise PolicyInvalid(str(path), (Problem("", "the file cannot be read"),)) from None
    return parse_policy(text, str(path))


def shipped_policy() -> PolicyDocument:
    """Read the policy that comes with Paceline."""
    return parse_policy(
        (resources.files("policies") / SHIPPED).read_text(encoding="utf-8"), SHIPPED
    )


def _plain(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such field"
    return message.removeprefix("Value error, ")
