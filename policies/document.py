"""The policy document: its schema, its consistency checks, and errors with line and field."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib import resources
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from paceline.error_messages import closest, message_of
from paceline.names import NAME_PATTERN, Name, OneModel
from paceline.request.profile import Priority
from policies.compiler import CompiledPolicy, compile_document
from policies.routes import Route, When
from policies.sections import (
    Limits,
    MediaRules,
    MetricsRules,
    ModelPolicy,
    Pool,
    PrefixPolicy,
    Retries,
    Section,
    ToolRules,
)
from policies.yaml_io import YamlInvalid, line_finder, read_yaml

DEFAULT_FILE = "default.yaml"
FieldPath = tuple[str | int, ...]
"""Steps from the top of a document: names of fields and indices of entries."""
_PROBLEMS_LIMIT = 32
_STEP_CHARS = 128


class Problem(NamedTuple):
    """One reason why a document is invalid."""

    field: str
    """The path of the field, such as routes.pictures.when.media; empty for the whole document.

    An entry of a list is written as its name, or as #1, #2 and so on without one.
    """
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


class PolicyDocument(Section):
    """The whole routing policy; its sections must also be consistent with each other."""

    version: Literal[1]
    """The version of this format."""
    models: dict[OneModel, ModelPolicy] = Field(default_factory=dict)
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
    """Retries and failover."""
    metrics: MetricsRules = MetricsRules()
    """The responses that contain draft metrics."""
    tools: ToolRules = ToolRules()
    """Tools that no worker can run."""

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
                yield at, "it matches every request, so later routes have no effect"
            if not always and index == len(self.routes) - 1:
                yield (*at, "when"), "the last route must match every request"


def parse_policy(text: str, source: str) -> PolicyDocument:
    """Parse a policy from YAML or JSON; raise `PolicyInvalid` with lines."""
    try:
        document = read_yaml(text)
    except YamlInvalid as invalid:
        problem = Problem("", invalid.message, invalid.line)
        raise PolicyInvalid(source, (problem,)) from None
    return read_policy(document, source, text)


def read_policy(document: Any, source: str, text: str = "") -> PolicyDocument:
    """Validate a parsed document; raise `PolicyInvalid` with every invalid field.

    The problems have the lines of the text, if there is one.
    """
    try:
        return PolicyDocument.model_validate(document)
    except ValidationError as invalid:
        raise PolicyInvalid(source, _problems(invalid, document, text)) from None


def default_text() -> str:
    """Return the text of the policy that is shipped with Paceline."""
    return (resources.files("policies") / DEFAULT_FILE).read_text(encoding="utf-8")


def default_policy() -> PolicyDocument:
    """Return the policy that is shipped with Paceline."""
    return parse_policy(default_text(), DEFAULT_FILE)


def example_texts() -> dict[str, str]:
    """Return the texts of the shipped examples by name."""
    folder = resources.files("policies") / "examples"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".yaml")
    }


def _problems(invalid: ValidationError, document: Any, text: str) -> tuple[Problem, ...]:
    """Return pydantic's errors as problems, at most `_PROBLEMS_LIMIT`, in the order of lines."""
    errors = invalid.errors(include_url=False, include_input=False)
    parents = {error["loc"][:steps] for error in errors for steps in range(len(error["loc"]))}
    found: dict[tuple[FieldPath, str], ErrorDetails] = {}
    for error in errors:
        at = error["loc"]
        if error["type"] == "too_short" and at in parents:
            continue  # pydantic does not count invalid entries, so the list only seems too short
        found.setdefault((_path(document, at), message_of(error)), error)
    # Suggestions for the shown ones alone: a long document may have thousands of problems.
    shown = dict(islice(found.items(), _PROBLEMS_LIMIT))
    suggested = {key: _suggestion(document, key[0], error) for key, error in shown.items()}
    misspelt = {(*path[:-1], name) for (path, _), name in suggested.items() if name}
    line_of = line_finder(text)
    problems = [
        Problem(
            _field(document, path),
            f"{message}; did you mean '{name}'?" if (name := suggested[path, message]) else message,
            line_of(path),
        )
        for (path, message), error in shown.items()
        # A misspelt field is one mistake, and not also the lack of the field that was meant.
        if not (error["type"] == "missing" and path in misspelt)
    ]
    if len(found) > _PROBLEMS_LIMIT:
        last = problems[-1]
        more = f"{last.message}; and {len(found) - _PROBLEMS_LIMIT} more problems"
        problems[-1] = last._replace(message=more)
    return tuple(sorted(problems, key=lambda problem: problem.line or 0))


def _path(document: Any, place: Iterable[Any]) -> FieldPath:
    """Return the path of an error, up to the last field that the document contains or lacks."""
    steps: list[str | int] = []
    at = document
    for step in place:
        if step == "[key]" or not isinstance(at, dict | list):
            break  # pydantic's marker of a key; or a single name in place of a list
        steps.append(step)
        at = _entry(at, step)
    return tuple(steps)


def _field(document: Any, path: FieldPath) -> str:
    """Return a path as text, with the names of list entries instead of their indexes."""
    steps: list[str] = []
    at = document
    for step in path:
        entries, at = at, _entry(at, step)
        name = at.get("name") if isinstance(at, dict) else None
        if not isinstance(entries, list):
            steps.append(str(step)[:_STEP_CHARS])
        elif isinstance(name, str) and re.fullmatch(NAME_PATTERN, name):
            steps.append(name)
        else:
            steps.append(f"#{int(step) + 1}")
    return ".".join(steps)


def _entry(parent: Any, step: str | int) -> Any:
    with contextlib.suppress(LookupError, TypeError):
        return parent[step]
    return None


def _suggestion(document: Any, path: FieldPath, error: ErrorDetails) -> str:
    """Return the name that was probably meant by an unknown one, or an empty string."""
    if error["type"] == "extra_forbidden":
        return closest(str(path[-1]), _section(path[:-1]).model_fields)
    if path[:1] == ("routes",) and path[2:3] == ("to",):
        pool = functools.reduce(_entry, path, document)
        pools = document.get("pools")
        if isinstance(pool, str) and isinstance(pools, dict) and pool not in pools:
            return closest(pool, map(str, pools))
    return ""


def _section(path: FieldPath) -> type[Section]:
    """Return the class of the section at a path."""
    section: type[Section] = PolicyDocument
    steps = iter(path)
    for step in steps:
        field = section.model_fields[str(step)]
        section, is_entry = _section_within(field.annotation)
        if is_entry:
            next(steps, None)  # the index or the name of the entry
    return section


def _section_within(annotation: Any) -> tuple[type[Section], bool]:
    """Return the section in the annotation of a field, and whether it is an entry of many."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    for part in get_args(annotation):
        section, is_entry = _section_within(part)
        if section is not Section:
            return section, is_entry or get_origin(annotation) in (dict, tuple)
    return Section, False
