"""The policy document: what may stand in it, and errors that name file and field."""

from __future__ import annotations

from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies.profile import SamplingDefaults

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
SHIPPED = "default.yaml"


class PolicyInvalid(ValueError):
    """A policy cannot be used; `problems` holds one (field, sentence) pair for each reason."""

    def __init__(self, source: str, problems: tuple[tuple[str, str], ...]) -> None:
        lines = (f"{field}: {what}" if field else what for field, what in problems)
        super().__init__(f"The policy {source} is not usable: " + "; ".join(lines))
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
        problems = [*self._alias_problems(), *self._route_problems()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _alias_problems(self) -> list[str]:
        problems = []
        owners: dict[str, str] = {}
        for model, entry in self.models.items():
            for alias in entry.aliases:
                if alias in self.models:
                    problems.append(f"models.{model}.aliases: '{alias}' is a model of its own")
                elif alias in owners:
                    problems.append(
                        f"models.{model}.aliases: '{alias}' already means '{owners[alias]}'"
                    )
                owners.setdefault(alias, model)
        return problems

    def _route_problems(self) -> list[str]:
        problems = []
        names = [route.name for route in self.routes]
        aliases = {alias for entry in self.models.values() for alias in entry.aliases}
        for index, route in enumerate(self.routes):
            where = f"routes.{index}"
            if route.name in names[:index]:
                problems.append(f"{where}.name: '{route.name}' is used twice")
            problems += [
                f"{where}.to: there is no pool '{pool}'"
                for pool in route.to
                if pool not in self.pools
            ]
            if route.spill is not None and len(route.to) == 1:
                problems.append(f"{where}.spill: there is no second pool to spill to")
            if route.when.model in aliases:
                problems.append(f"{where}.when.model: '{route.when.model}' is an alias")
            always = route.when == When()
            if always and index < len(self.routes) - 1:
                problems.append(f"{where}: it takes every request, so no later route is reached")
            if not always and index == len(self.routes) - 1:
                problems.append(f"{where}.when: the last route must take every request")
        return problems


def read_policy(document: Any, source: str) -> PolicyDocument:
    """Check a parsed document; raise `PolicyInvalid` naming every wrong field."""
    if not isinstance(document, dict):
        raise PolicyInvalid(source, (("", "it must be a mapping"),))
    try:
        return PolicyDocument.model_validate(document)
    except ValidationError as invalid:
        problems = tuple(
            (".".join(str(part) for part in error["loc"]), _plain(error["type"], error["msg"]))
            for error in invalid.errors(include_url=False, include_input=False)
        )
        raise PolicyInvalid(source, problems) from None


def load_policy(path: Path) -> PolicyDocument:
    """Read a policy file (YAML, so also JSON); raise `PolicyInvalid`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise PolicyInvalid(str(path), (("", "the file cannot be read"),)) from None
    return _parse(text, str(path))


def shipped_policy() -> PolicyDocument:
    """Read the policy that comes with Paceline."""
    return _parse((resources.files("policies") / SHIPPED).read_text(encoding="utf-8"), SHIPPED)


def _parse(text: str, source: str) -> PolicyDocument:
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        raise PolicyInvalid(source, ((where, "it is not YAML"),)) from None
    return read_policy(document, source)


def _plain(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "there is no such field"
    return message.removeprefix("Value error, ")
