"""The document in the form in which it is asked: one look for each property of a request.

A route is one bit. Each question turns one property of a request into the set of routes that take
any request with that property; the routes that take this very request are what all answers have in
common, and the lowest bit is the first of them. So the time hardly depends on how many routes there
are, only on how many properties they ask for.

Who asks, for as far as a policy may care: never their words, never their secret.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import attrgetter, xor
from types import MappingProxyType
from typing import Any, NamedTuple

from policies.request.profile import RequestProfile, SamplingDefaults
from policies.routes import Range, Route, When
from policies.sections import ModelPolicy

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class CallerAttributes(NamedTuple):
    """One asker at one moment."""

    key: str = ""
    """The id of the key, never the secret; empty without one."""
    team: str = ""
    headers: Mapping[str, str] = _NO_HEADERS
    """Those that the policy names, in lower case; all others are not kept."""
    minute_of_week: int = 0
    """Local time of the gateway, from Monday 00:00."""


ANONYMOUS = CallerAttributes()
"""Nothing is known of them."""


class MatchInput(NamedTuple):
    """One request at one moment, as conditions see it."""

    profile: RequestProfile
    caller: CallerAttributes
    mtp_eligible: bool


RouteSet = int
"""A set of routes: bit i stands for the route of index i."""
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
    ("logprobs", lambda look: look.profile.top_logprobs is not None),
    ("multiple_choices", lambda look: look.profile.choices > 1),
    ("logits_processors", attrgetter("profile.sampling.reshapes_logits")),
    ("thinking_budget", lambda look: look.profile.thinking_budget is not None),
)
_NUMBERS: tuple[tuple[str, _Read], ...] = (
    ("prompt_chars", attrgetter("profile.text_chars")),
    ("max_tokens", lambda look: inf if (most := look.profile.max_tokens) is None else most),
    ("messages", attrgetter("profile.messages")),
)
_NAMES: tuple[tuple[str, _Read], ...] = (
    ("model", attrgetter("profile.model")),
    ("key", attrgetter("caller.key")),
    ("team", attrgetter("caller.team")),
)


class CompiledPolicy(NamedTuple):
    """All that can be worked out of a document before the first request comes."""

    all_routes: RouteSet
    matchers: tuple[Matcher, ...]
    aliases: Mapping[str, str]
    """Alias -> model."""
    sampling: Mapping[str, SamplingDefaults]
    headers: tuple[str, ...]
    """Names of the request headers that some route asks for."""


def compile_document(routes: Sequence[Route], models: Mapping[str, ModelPolicy]) -> CompiledPolicy:
    """Work out of the parts of a document what every request needs of them."""
    whens = [route.when for route in routes]
    headers = sorted({name for when in whens for name in when.header or ()})
    return CompiledPolicy(
        all_routes=(1 << len(routes)) - 1,
        matchers=tuple(question for question in _questions(whens, headers) if question),
        aliases={alias: name for name, model in models.items() for alias in model.aliases},
        sampling={name: model.sampling.defaults for name, model in models.items()},
        headers=tuple(headers),
    )


def _questions(whens: Sequence[When], headers: Iterable[str]) -> Iterable[Matcher | None]:
    """Give a question for each property, None where no route asks for it."""
    yield _media([when.media for when in whens])
    for name, read in _FLAGS:
        yield _flag([getattr(when, name) for when in whens], read)
    for name, read in _FEATURES:
        yield _flag([getattr(when.features, name, None) for when in whens], read)
    for name, read in _NUMBERS:
        yield _number([getattr(when, name) for when in whens], read)
    for name, read in _NAMES:
        yield _name([getattr(when, name) for when in whens], read)
    for name in headers:
        yield _name([(when.header or {}).get(name) for when in whens], _header(name))
    yield _time([when.windows() for when in whens])


def _flag(wanted: Sequence[bool | None], read: _Read) -> Matcher | None:
    if not _given(wanted):
        return None
    when_true = _bits(want is not False for want in wanted)
    when_false = _bits(want is not True for want in wanted)
    return lambda look: when_true if read(look) else when_false


def _name(wanted: Sequence[tuple[str, ...] | None], read: _Read) -> Matcher | None:
    if not _given(wanted):
        return None
    elsewhere = _bits(names is None for names in wanted)
    where: defaultdict[str, RouteSet] = defaultdict(lambda: elsewhere)
    for index, names in enumerate(wanted):
        for name in names or ():
            where[name] |= 1 << index
    found = dict(where)
    return lambda look: found.get(read(look), elsewhere)


def _header(name: str) -> _Read:
    return lambda look: look.caller.headers.get(name)


def _media(wanted: Sequence[bool | tuple[str, ...] | None]) -> Matcher | None:
    if not _given(wanted):
        return None
    without = _bits(want is None or want is False for want in wanted)
    with_any = _bits(want is None or want is True for want in wanted)
    kinds = {kind for want in wanted if isinstance(want, tuple) for kind in want}
    named = {
        kind: _bits(isinstance(want, tuple) and kind in want for want in wanted) for kind in kinds
    }

    def ask(look: MatchInput) -> RouteSet:
        media = look.profile.media
        if not media:
            return without
        found = with_any
        for kind, _ in media:
            found |= named.get(kind, 0)
        return found

    return ask


def _number(wanted: Sequence[Range | None], read: _Read) -> Matcher | None:
    below = 0
    changes: defaultdict[int, RouteSet] = defaultdict(int)
    for index, one in enumerate(wanted):
        route = 1 << index
        if one is None or one.at_least is None:
            below |= route
        else:
            changes[one.at_least] ^= route
        if one is not None and one.at_most is not None:
            changes[one.at_most + 1] ^= route
    return _steps(below, changes, read)


def _time(wanted: Sequence[tuple[tuple[int, int], ...] | None]) -> Matcher | None:
    always = _bits(windows is None for windows in wanted)
    changes: defaultdict[int, RouteSet] = defaultdict(int)
    for index, windows in enumerate(wanted):
        for minute in (minute for window in windows or () for minute in window):
            changes[minute] ^= 1 << index  # at its first minute it opens, at its end it shuts
    return _steps(always, changes, attrgetter("caller.minute_of_week"))


def _steps(below: RouteSet, changes: Mapping[int, RouteSet], read: _Read) -> Matcher | None:
    """Ask a number: the answer is `below` up to the first edge, and changes by routes at each."""
    if not changes:
        return None
    edges = sorted(changes)
    between = [*accumulate(map(changes.__getitem__, edges), xor, initial=below)]
    return lambda look: between[bisect_right(edges, read(look))]


def _given(wanted: Iterable[object]) -> bool:
    return any(want is not None for want in wanted)


def _bits(holds: Iterable[bool]) -> RouteSet:
    return sum(1 << index for index, one in enumerate(holds) if one)
