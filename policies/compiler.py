"""The compiled form of a policy: a request matches a route if all tests of the route hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
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


Test = Callable[[MatchInput], bool]
_Read = Callable[[MatchInput], Any]
_READERS: Mapping[str, _Read] = {
    "endpoint": attrgetter("profile.endpoint"),
    "model": attrgetter("profile.model"),
    "key": attrgetter("caller.key"),
    "team": attrgetter("caller.team"),
    "media": attrgetter("profile.media"),
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
    "max_tokens": lambda request: inf if (most := request.profile.max_tokens) is None else most,
    "messages": attrgetter("profile.messages"),
}
"""What a condition is about, by its field in `When` or `Features`."""


class CompiledPolicy(NamedTuple):
    """The parts of a document that requests use, computed once per document."""

    tests: tuple[tuple[Test, ...], ...]
    """By route, in the order of the document."""
    aliases: Mapping[str, str]
    """Alias -> model."""
    sampling: Mapping[str, Mapping[str, Any]]
    """Model -> the sampling fields that the policy sets."""
    headers: tuple[str, ...]
    """The names of the request headers that conditions use."""


def compile_document(routes: Sequence[Route], models: Mapping[str, ModelPolicy]) -> CompiledPolicy:
    """Return the compiled form of the routes and models of a document."""
    return CompiledPolicy(
        tests=tuple(tuple(_tests(route.when)) for route in routes),
        aliases={alias: name for name, model in models.items() for alias in model.aliases},
        sampling={name: model.sampling.given() for name, model in models.items()},
        headers=tuple(sorted({name for route in routes for name in route.when.header or ()})),
    )


def _tests(when: When) -> Iterator[Test]:
    """Yield a test for each condition."""
    for name, wanted in (*when, *(when.features or ())):
        if wanted is None or name not in _READERS:
            continue
        if name == "media" and isinstance(wanted, tuple):
            yield _media_test(wanted)
        else:
            yield _test(_READERS[name], wanted)
    for name, values in (when.header or {}).items():
        yield _test(_header(name), values)
    if (times := when.times) is not None:
        begins, length = times
        yield lambda request: any(
            (request.caller.minute_of_week - begin) % MINUTES_OF_WEEK < length for begin in begins
        )


def _test(read: _Read, wanted: bool | tuple[str, ...] | Range) -> Test:
    if isinstance(wanted, bool):
        return lambda request: bool(read(request)) is wanted
    if isinstance(wanted, tuple):
        return lambda request: read(request) in wanted
    low, high = wanted.at_least or 0, inf if wanted.at_most is None else wanted.at_most
    return lambda request: low <= read(request) <= high


def _media_test(kinds: tuple[str, ...]) -> Test:
    return lambda request: any(kind in kinds for kind, _ in request.profile.media)


def _header(name: str) -> _Read:
    return lambda request: request.caller.headers.get(name)
