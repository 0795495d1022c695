"""The compiled form of a policy: one lookup per property of a request.

Each route is one bit. A matcher maps one property of a request to the set of routes whose condition
on that property matches. The intersection of all sets contains the matching routes, and its lowest
bit is the first of them, so the time depends on the number of properties in use rather than on the
number of routes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter, xor
from types import MappingProxyType
from typing import Any, NamedTuple

from paceline.request.profile import RequestProfile
from policies.routes import Range, Route, When
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


RouteSet = int
"""A set of routes: bit i is the route of index i."""
Matcher = Callable[[MatchInput], RouteSet]
_Read = Callable[[MatchInput], Any]
_FLAGS: tuple[tuple[str, _Read], ...] = (
    ("mtp_eligible", attrgetter("mtp_eligible")),
    ("greedy", attrgetter("profile.sampling.greedy")),
    ("stream", attrgetter("profile.stream")),
)
_FEATURES: tuple[tuple[str, _Read], ...] = (
    ("tools", attrgetter("profile.tools")),
    ("structured_output", attrgetter("profile.structured_output")),
    ("logprobs", lambda request: request.profile.top_logprobs is not None),
    ("multiple_choices", lambda request: request.profile.choices > 1),
    ("logits_processors", attrgetter("profile.sampling.reshapes_logits")),
    ("thinking_budget", lambda request: request.profile.thinking_budget is not None),
)
_NUMBERS: tuple[tuple[str, _Read], ...] = (
    ("prompt_chars", attrgetter("profile.text_chars")),
    ("max_tokens", lambda request: inf if (limit := request.profile.max_tokens) is None else limit),
    ("messages", attrgetter("profile.messages")),
)
_NAMES: tuple[tuple[str, _Read], ...] = (
    ("endpoint", attrgetter("profile.endpoint")),
    ("model", attrgetter("profile.model")),
    ("key", attrgetter("caller.key")),
    ("team", attrgetter("caller.team")),
)


class CompiledPolicy(NamedTuple):
    """The parts of a document that requests use, computed once per document."""

    all_routes: RouteSet
    matchers: tuple[Matcher, ...]
    aliases: Mapping[str, str]
    """Alias -> model."""
    sampling: Mapping[str, Mapping[str, Any]]
    """Model -> the sampling fields that the policy sets."""
    headers: tuple[str, ...]
    """The names of the request headers that conditions use."""


def compile_document(routes: Sequence[Route], models: Mapping[str, ModelPolicy]) -> CompiledPolicy:
    """Return the compiled form of the routes and models of a document."""
    whens = [route.when for route in routes]
    headers = sorted({name for when in whens for name in when.header or ()})
    return CompiledPolicy(
        all_routes=(1 << len(routes)) - 1,
        matchers=tuple(
            make_matcher(wanted, read)
            for make_matcher, wanted, read in _conditions(whens, headers)
            if any(want is not None for want in wanted)
        ),
        aliases={alias: name for name, model in models.items() for alias in model.aliases},
        sampling={name: model.sampling.given() for name, model in models.items()},
        headers=tuple(headers),
    )


def _conditions(
    whens: Sequence[When], headers: Iterable[str]
) -> Iterator[tuple[Callable[[Sequence[Any], _Read], Matcher], Sequence[Any], _Read]]:
    """Yield for each property its kind of matcher, the condition of each route, and its reader."""
    yield _media, [when.media for when in whens], attrgetter("profile.media")
    for name, read in _FLAGS:
        yield _flag, [getattr(when, name) for when in whens], read
    for name, read in _FEATURES:
        yield _flag, [getattr(when.features, name, None) for when in whens], read
    for name, read in _NUMBERS:
        ranges: list[Range | None] = [getattr(when, name) for when in whens]
        yield _number, [bounds and bounds.edges for bounds in ranges], read
    for name, read in _NAMES:
        yield _name, [getattr(when, name) for when in whens], read
    for name in headers:
        yield _name, [(when.header or {}).get(name) for when in whens], _header(name)
    yield _number, [when.time_edges for when in whens], attrgetter("caller.minute_of_week")


def _flag(wanted: Sequence[bool | None], read: _Read) -> Matcher:
    when_true = _bits(want is not False for want in wanted)
    when_false = _bits(want is not True for want in wanted)
    return lambda request: when_true if read(request) else when_false


def _name(wanted: Sequence[tuple[str, ...] | None], read: _Read) -> Matcher:
    unnamed = _bits(names is None for names in wanted)
    routes: defaultdict[str, RouteSet] = defaultdict(lambda: unnamed)
    for index, names in enumerate(wanted):
        for name in names or ():
            routes[name] |= 1 << index
    by_name = dict(routes)
    return lambda request: by_name.get(read(request), unnamed)


def _header(name: str) -> _Read:
    return lambda request: request.caller.headers.get(name)


def _media(wanted: Sequence[bool | tuple[str, ...] | None], read: _Read) -> Matcher:
    without = _bits(want is None or want is False for want in wanted)
    with_any = _bits(want is None or want is True for want in wanted)
    kinds = {kind for want in wanted if isinstance(want, tuple) for kind in want}
    by_kind = {
        kind: _bits(isinstance(want, tuple) and kind in want for want in wanted) for kind in kinds
    }

    def match(request: MatchInput) -> RouteSet:
        media = read(request)
        if not media:
            return without
        matching = with_any
        for kind, _ in media:
            matching |= by_kind.get(kind, 0)
        return matching

    return match


def _number(wanted: Sequence[tuple[int, ...] | None], read: _Read) -> Matcher:
    """Return a matcher of numbers: each edge of a route adds the route or removes it."""
    changes: defaultdict[int, RouteSet] = defaultdict(int)
    for index, edges in enumerate(wanted):
        for edge in edges or ():
            changes[edge] ^= 1 << index
    numbers = sorted(changes)
    below = _bits(edges is None for edges in wanted)
    sets = [*accumulate(map(changes.__getitem__, numbers), xor, initial=below)]
    return lambda request: sets[bisect_right(numbers, read(request))]


def _bits(flags: Iterable[bool]) -> RouteSet:
    return sum(1 << index for index, flag in enumerate(flags) if flag)
