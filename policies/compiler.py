"""The compiled form of a policy: the properties of requests that each route accepts.

A request is read once, however many routes have conditions on the same property.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from paceline.request.profile import RequestProfile
from policies.routes import MINUTES_OF_WEEK, Range, Route, When
from policies.sections import ModelPolicy

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class CallerAttributes(NamedTuple):
    """The properties of a client that conditions may use, at one moment; never a secret."""

    key: str = ""
    """The id of the key, never the secret; empty without one."""
    team: str = ""
    headers: Mapping[str, str] = _NO_HEADERS
    """The headers that the policy names, in lower case."""
    minute_of_week: int = 0
    """Local time of the gateway, from Monday 00:00."""


ANONYMOUS = CallerAttributes()
"""A client without a key, team or headers."""


class MatchInput(NamedTuple):
    """The properties of one request that conditions may use."""

    profile: RequestProfile
    caller: CallerAttributes
    mtp_eligible: bool


_Read = Callable[[MatchInput], Any]
_UNLIMITED = 2**62
_READERS: Mapping[str, _Read] = {
    "endpoint": attrgetter("profile.endpoint"),
    "model": attrgetter("profile.model"),
    "key": attrgetter("caller.key"),
    "team": attrgetter("caller.team"),
    "media": attrgetter("profile.media"),
    "has_media": lambda request: bool(request.profile.media),
    "mtp_eligible": attrgetter("mtp_eligible"),
    "greedy": attrgetter("profile.sampling.greedy"),
    "stream": attrgetter("profile.stream"),
    "tools": attrgetter("profile.tools"),
    "structured_output": attrgetter("profile.structured_output"),
    "logprobs": lambda request: request.profile.top_logprobs is not None,
    "multiple_choices": lambda request: request.profile.choices > 1,
    "logits_processors": attrgetter("profile.sampling.reshapes_logits"),
    "thinking_budget": lambda request: request.profile.thinking_budget is not None,
    "prompt_chars": attrgetter("profile.text_chars"),
    "max_tokens": lambda request: (
        _UNLIMITED if request.profile.max_tokens is None else request.profile.max_tokens
    ),
    "messages": attrgetter("profile.messages"),
    "times": attrgetter("caller.minute_of_week"),
}
"""The property that a condition tests, by its field in `When` or `Features`."""


class _AnyMedia(NamedTuple):
    """All media that contain one of these kinds."""

    kinds: tuple[str, ...]

    def __contains__(self, media: Any) -> bool:
        return any(kind in self.kinds for kind, _ in media)


class _Times(NamedTuple):
    """The minutes of the week from each of these on, so many."""

    begins: tuple[int, ...]
    length: int

    def __contains__(self, minute: Any) -> bool:
        return any((minute - begin) % MINUTES_OF_WEEK < self.length for begin in self.begins)


class CompiledPolicy(NamedTuple):
    """The parts of a document that requests use, computed once per document."""

    readers: tuple[_Read, ...]
    """The properties of a request that conditions use."""
    conditions: tuple[tuple[tuple[int, Container[Any]], ...], ...]
    """For each route the properties, by index, and their matching values."""
    aliases: Mapping[str, str]
    """Alias -> model."""
    sampling: Mapping[str, Mapping[str, Any]]
    """Model -> the sampling fields that the policy sets."""
    headers: tuple[str, ...]
    """The names of the request headers that conditions use."""


def compile_document(routes: Sequence[Route], models: Mapping[str, ModelPolicy]) -> CompiledPolicy:
    """Return the compiled form of the routes and models of a document."""
    routes_by_property = [dict(_conditions(route.when)) for route in routes]
    names = [*dict.fromkeys(name for wanted in routes_by_property for name in wanted)]
    headers = sorted({name for route in routes for name in route.when.header or ()})
    readers = {**_READERS, **{f"header {name}": _header(name) for name in headers}}
    return CompiledPolicy(
        readers=tuple(readers[name] for name in names),
        conditions=tuple(
            tuple((names.index(name), accepted) for name, accepted in wanted.items())
            for wanted in routes_by_property
        ),
        aliases={alias: name for name, model in models.items() for alias in model.aliases},
        sampling={name: model.sampling.given() for name, model in models.items()},
        headers=tuple(headers),
    )


def _conditions(when: When) -> Iterator[tuple[str, Container[Any]]]:
    """Yield each property with a condition, and the values that match."""
    for name, wanted in (*when, *(when.features or ())):
        if name in _READERS and wanted is not None:
            yield _condition(name, wanted)
    if when.times is not None:
        yield "times", _Times(*when.times)
    for name, values in (when.header or {}).items():
        yield f"header {name}", frozenset(values)


def _condition(name: str, wanted: bool | tuple[str, ...] | Range) -> tuple[str, Container[Any]]:
    if isinstance(wanted, Range):
        end = _UNLIMITED if wanted.at_most is None else min(wanted.at_most, _UNLIMITED - 1)
        return name, range(wanted.at_least or 0, end + 1)
    if isinstance(wanted, bool):
        return "has_media" if name == "media" else name, (wanted,)
    return name, _AnyMedia(wanted) if name == "media" else frozenset(wanted)


def _header(name: str) -> _Read:
    return lambda request: request.caller.headers.get(name)
