"""What the policy says of one request: pure functions over the document and the profile."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from policies.compiler import ANONYMOUS, CallerAttributes, MatchInput
from policies.document import PolicyDocument
from policies.request.profile import (
    OPENAI_DEFAULTS,
    Bypass,
    RequestProfile,
    SamplingDefaults,
    bypass_reasons,
)
from policies.routes import Route

# The one alias that follows the fleet: a client that only wants an answer may always ask for it.
ANY_MODEL = "default"


class RouteMatch(NamedTuple):
    """The route that takes a request, and what keeps the request from speculation."""

    route: Route
    bypass: tuple[Bypass, ...]


def resolve_model(policy: PolicyDocument, asked: str, served: Set[str]) -> str:
    """Turn the name a client used into the name of a model; unknown names come back unchanged."""
    if asked in served or asked in policy.models:
        return asked
    target = policy.compiled.aliases.get(asked, asked)
    if asked == ANY_MODEL and target not in served and len(served) == 1:
        return next(iter(served))
    return target


def sampling_defaults(policy: PolicyDocument, model: str) -> SamplingDefaults:
    """Say what stands in for sampling fields that a request to this model leaves out."""
    return policy.compiled.sampling.get(model, OPENAI_DEFAULTS)


def match_route(
    policy: PolicyDocument, profile: RequestProfile, asker: CallerAttributes = ANONYMOUS
) -> RouteMatch:
    """Find the first route whose conditions hold; the last route always does."""
    bypass = bypass_reasons(profile)
    look = MatchInput(profile, asker, not bypass)
    compiled = policy.compiled
    taking = compiled.all_routes
    for question in compiled.matchers:
        taking &= question(look)
    first = (taking & -taking).bit_length() - 1
    return RouteMatch(policy.routes[first], bypass)
