"""Pure functions that apply a policy to one request: model, sampling defaults, route."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

from paceline.request.profile import (
    OPENAI_DEFAULTS,
    Bypass,
    RequestProfile,
    Sampling,
    bypass_reasons,
)
from policies.compiler import ANONYMOUS, CallerAttributes, MatchInput
from policies.document import PolicyDocument
from policies.routes import Route

# The one alias that follows the fleet, for clients that accept any model.
ANY_MODEL = "default"


class RouteMatch(NamedTuple):
    """The route of a request, and the reasons that exclude speculation."""

    route: Route
    bypass: tuple[Bypass, ...]


def resolve_model(policy: PolicyDocument, name: str, served: Set[str]) -> str:
    """Return the model that a client's name refers to; unknown names are returned unchanged."""
    if name in served or name in policy.models:
        return name
    target = policy.compiled.aliases.get(name, name)
    if name == ANY_MODEL and target not in served and len(served) == 1:
        return next(iter(served))
    return target


def sampling_defaults(
    policy: PolicyDocument, model: str, reported: Mapping[str, Sampling] = MappingProxyType({})
) -> Sampling:
    """Return the values for sampling fields that a request to this model omits.

    The policy decides, else the workers' report of the model, else OpenAI's defaults.
    """
    defaults = reported.get(model, OPENAI_DEFAULTS)
    given = policy.compiled.sampling.get(model)
    return defaults._replace(**given) if given else defaults


def match_route(
    policy: PolicyDocument, profile: RequestProfile, caller: CallerAttributes = ANONYMOUS
) -> RouteMatch:
    """Return the first route whose conditions match; the last route always matches."""
    bypass = bypass_reasons(profile)
    request = MatchInput(profile, caller, not bypass)
    compiled = policy.compiled
    values = [read(request) for read in compiled.readers]
    for route, conditions in zip(policy.routes, compiled.conditions, strict=True):
        for index, accepted in conditions:
            if values[index] not in accepted:
                break
        else:
            return RouteMatch(route, bypass)
    raise AssertionError("the last route has no conditions")
