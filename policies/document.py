"""The policy document: what may stand in it, and errors that name file, line and field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cached_property
from importlib import resources
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from policies.base import Name, Section
from policies.compiler import CompiledPolicy, compile_document
from policies.error_messages import message_of
from policies.routes import Route, When
from policies.sections import (
    Limits,
    MediaRules,
    MetricsRules,
    ModelPolicy,
    Pool,
    PrefixPolicy,
    Retries,
)
from policies.yaml_io import YamlInvalid, line_of, read_yaml

DEFAULT_FILE = "default.yaml"
FieldPath = tuple[str | int, ...]
"""Steps from the top of a document: names of fields and numbers of entries."""
_PROBLEMS_TOLD = 32


class Problem(NamedTuple):
    """One reason why a document cannot be used."""

    field: str
    """As routes.0.when.media; empty where it is the document as a whole."""
    message: str
    line: int | None = None
    """Where it stands, in a document that was read from text."""

    def __str__(self) -> str:
        where = (f"line {self.line}" if self.line else "", self.field)
        return ": ".join(part for part in (*where, self.message) if part)


class PolicyInvalid(ValueError):
    """A policy cannot be used; `problems` holds every reason."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        told = "; ".join(map(str, problems))
        super().__init__(f"The policy {source} is not usable: {told}")
        self.source = source
        self.problems = problems


class Priority(StrEnum):
    """How a request stands in a waiting line."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BULK = "bulk"


class PolicyDocument(Section):
    """The whole routing policy; checked for sense, not only for shape."""

    version: Literal[1]
    """Of this format."""
    models: dict[Name, ModelPolicy] = Field(default_factory=dict)
    """Models by their own names; those that need nothing said of them need no entry."""
    routes: Annotated[tuple[Route, ...], Field(strict=False, min_length=1)]
    """The first whose `when` holds takes the request; the last must take every request."""
    pools: dict[Name, Pool] = Field(min_length=1)
    """Pools by name, for routes to name."""
    priorities: Annotated[
        tuple[Annotated[Priority, Field(strict=False)], ...], Field(strict=False)
    ] = tuple(Priority)
    """Those that a client may ask for with x-paceline-priority."""
    limits: Limits = Limits()
    """What one request may ask for and take."""
    media: MediaRules = MediaRules()
    """What one request may bring along beside text."""
    prefix: PrefixPolicy = PrefixPolicy()
    """Who may share a system prompt that workers keep, and how long they are taken to hold it."""
    retries: Retries = Retries()
    """How many of the active requests may be on a further attempt at once."""
    metrics: MetricsRules = MetricsRules()
    """Which answers tell what drafting did for them."""

    @cached_property
    def compiled(self) -> CompiledPolicy:
        """The same in the form in which it is asked; made once."""
        return compile_document(self.routes, self.models)

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

    def _alias_problems(self) -> Iterator[tuple[FieldPath, str]]:
        owners: dict[str, str] = {}
        for model, entry in self.models.items():
            for index, alias in enumerate(entry.aliases):
                place = ("models", model, "aliases", index)
                if alias in self.models:
                    yield place, f"'{alias}' is a model of its own"
                elif alias in owners:
                    yield place, f"'{alias}' already means '{owners[alias]}'"
                owners.setdefault(alias, model)

    def _route_problems(self) -> Iterator[tuple[FieldPath, str]]:
        names: set[str] = set()
        aliases = {alias for entry in self.models.values() for alias in entry.aliases}
        for index, route in enumerate(self.routes):
            at = ("routes", index)
            if route.name in names:
                yield (*at, "name"), f"'{route.name}' is used twice"
            names.add(route.name)
            pools: set[str] = set()
            for number, pool in enumerate(route.to):
                if pool not in self.pools:
                    yield (*at, "to", number), f"there is no pool '{pool}'"
                elif pool in pools:
                    yield (*at, "to", number), f"'{pool}' stands twice"
                pools.add(pool)
            if route.spill is not None and len(route.to) == 1:
                yield (*at, "spill"), "there is no second pool to spill to"
            for number, model in enumerate(route.when.model or ()):
                if model in aliases:
                    yield (*at, "when", "model", number), f"'{model}' is an alias"
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
        raise PolicyInvalid(source, _problems(invalid, document)) from None


def parse_policy(text: str, source: str) -> PolicyDocument:
    """Read a policy from text (YAML, so also JSON); raise `PolicyInvalid` with lines."""
    try:
        return read_policy(read_yaml(text), source)
    except YamlInvalid as invalid:
        problems = [Problem("", invalid.what, invalid.line)]
    except PolicyInvalid as invalid:
        problems = [one._replace(line=line_of(text, one.field)) for one in invalid.problems]
    raise PolicyInvalid(source, tuple(sorted(problems, key=lambda one: one.line or 0)))


def default_policy() -> PolicyDocument:
    """Read the policy that comes with Paceline."""
    return parse_policy(
        (resources.files("policies") / DEFAULT_FILE).read_text(encoding="utf-8"), DEFAULT_FILE
    )


def _problems(invalid: ValidationError, document: dict[str, Any]) -> tuple[Problem, ...]:
    """Say in plain words what pydantic found."""
    errors = invalid.errors(include_url=False, include_input=False)
    around = {error["loc"][:steps] for error in errors for steps in range(len(error["loc"]))}
    found = []
    for error in errors:
        at = error["loc"]
        if error["type"] == "too_short" and at in around:
            continue  # what is wrong inside is not counted, and so there seem to be too few
        found.append(Problem(_field(document, at), message_of(error)))
    told = tuple(dict.fromkeys(found))
    if len(told) <= _PROBLEMS_TOLD:
        return told
    last = told[_PROBLEMS_TOLD - 1]
    more = f"{last.message}; and {len(told) - _PROBLEMS_TOLD} mistakes more"
    return (*told[: _PROBLEMS_TOLD - 1], last._replace(message=more))


def _field(document: Any, place: Iterable[Any]) -> str:
    """Spell a place as far as it was written, and a field that is missing there."""
    steps: list[str] = []
    at = document
    for step in place:
        if step == "[key]" or not isinstance(at, dict | list):
            break  # pydantic's word for a key; or one name that stands for a list of one
        steps.append(str(step))
        try:
            at = at[step]
        except (LookupError, TypeError):
            break
    return ".".join(steps)
