"""The policy document: its schema, its consistency checks, and errors with line and field."""

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
"""Steps from the top of a document: names of fields and indices of entries."""
_PROBLEMS_LIMIT = 32


class Problem(NamedTuple):
    """One reason why a document is invalid."""

    field: str
    """The path of the field, such as routes.0.when.media; empty for the whole document."""
    message: str
    line: int | None = None
    """The line of the field in the text, counted from 1, if it is known."""

    def __str__(self) -> str:
        where = (f"line {self.line}" if self.line else "", self.field)
        return ": ".join(part for part in (*where, self.message) if part)


class PolicyInvalid(ValueError):
    """A policy is invalid; `problems` contains every reason."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        self.reasons = "; ".join(map(str, problems))
        """All problems in one line, without their source."""
        super().__init__(f"The policy {source} is invalid: {self.reasons}")


class Priority(StrEnum):
    """The priority of a request in a queue."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BULK = "bulk"


class PolicyDocument(Section):
    """The whole routing policy; its sections must also be consistent with each other."""

    version: Literal[1]
    """The version of this format."""
    models: dict[Name, ModelPolicy] = Field(default_factory=dict)
    """Models by the names under which workers serve them; an entry is optional."""
    routes: Annotated[tuple[Route, ...], Field(strict=False, min_length=1)]
    """The first route whose `when` matches takes the request; the last must match every request."""
    pools: dict[Name, Pool] = Field(min_length=1)
    """Pools by name; routes refer to these names."""
    priorities: Annotated[
        tuple[Annotated[Priority, Field(strict=False)], ...], Field(strict=False)
    ] = tuple(Priority)
    """The priorities that a client may request with x-paceline-priority."""
    limits: Limits = Limits()
    """Bounds of one request."""
    media: MediaRules = MediaRules()
    """Kinds, number and size of the media in one request."""
    prefix: PrefixPolicy = PrefixPolicy()
    """Sharing of cached system prompts between clients."""
    retries: Retries = Retries()
    """The retry budget."""
    metrics: MetricsRules = MetricsRules()
    """The responses that contain draft metrics."""

    @cached_property
    def compiled(self) -> CompiledPolicy:
        """The compiled form of the document, built once."""
        return compile_document(self.routes, self.models)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        problems = [
            InitErrorDetails(
                type=PydanticCustomError("inconsistent", "{message}", {"message": message}),
                loc=place,
                input=None,
            )
            for place, message in (*self._alias_problems(), *self._route_problems())
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
                    yield place, f"'{alias}' is the name of a model"
                elif alias in owners:
                    yield place, f"'{alias}' is already an alias of '{owners[alias]}'"
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
                    yield (*at, "to", number), f"'{pool}' is listed twice"
                pools.add(pool)
            if route.spill is not None and len(route.to) == 1:
                yield (*at, "spill"), "there is no second pool to spill to"
            for number, model in enumerate(route.when.model or ()):
                if model in aliases:
                    yield (*at, "when", "model", number), f"'{model}' is an alias"
            always = route.when == When()
            if always and index < len(self.routes) - 1:
                yield at, "it matches every request, so later routes are never reached"
            if not always and index == len(self.routes) - 1:
                yield (*at, "when"), "the last route must match every request"


def read_policy(document: Any, source: str) -> PolicyDocument:
    """Validate a parsed document; raise `PolicyInvalid` with every invalid field."""
    try:
        return PolicyDocument.model_validate(document)
    except ValidationError as invalid:
        raise PolicyInvalid(source, _problems(invalid, document)) from None


def parse_policy(text: str, source: str) -> PolicyDocument:
    """Parse a policy from YAML or JSON; raise `PolicyInvalid` with lines."""
    try:
        return read_policy(read_yaml(text), source)
    except YamlInvalid as invalid:
        problems = [Problem("", invalid.message, invalid.line)]
    except PolicyInvalid as invalid:
        problems = [
            problem._replace(line=line_of(text, problem.field)) for problem in invalid.problems
        ]
    raise PolicyInvalid(source, tuple(sorted(problems, key=lambda problem: problem.line or 0)))


def default_policy() -> PolicyDocument:
    """Return the policy that is shipped with Paceline."""
    return parse_policy(
        (resources.files("policies") / DEFAULT_FILE).read_text(encoding="utf-8"), DEFAULT_FILE
    )


def _problems(invalid: ValidationError, document: dict[str, Any]) -> tuple[Problem, ...]:
    """Return pydantic's errors as problems, at most `_PROBLEMS_LIMIT`."""
    errors = invalid.errors(include_url=False, include_input=False)
    parents = {error["loc"][:steps] for error in errors for steps in range(len(error["loc"]))}
    found: dict[Problem, None] = {}
    for error in errors:
        at = error["loc"]
        if error["type"] == "too_short" and at in parents:
            continue  # pydantic does not count invalid entries, so the list only seems too short
        found[Problem(_field(document, at), message_of(error))] = None
    problems = tuple(found)
    if len(problems) <= _PROBLEMS_LIMIT:
        return problems
    last = problems[_PROBLEMS_LIMIT - 1]
    more = f"{last.message}; and {len(problems) - _PROBLEMS_LIMIT} more problems"
    return (*problems[: _PROBLEMS_LIMIT - 1], last._replace(message=more))


def _field(document: Any, place: Iterable[Any]) -> str:
    """Return the path of an error, up to the last field that the document contains or lacks."""
    steps: list[str] = []
    at = document
    for step in place:
        if step == "[key]" or not isinstance(at, dict | list):
            break  # pydantic's marker of a key; or a single name in place of a list
        steps.append(str(step))
        try:
            at = at[step]
        except (LookupError, TypeError):
            break
    return ".".join(steps)
