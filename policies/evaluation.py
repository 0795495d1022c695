"""What the policy says of one request: pure functions over the document and the profile."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from policies.asker import SOMEBODY, Asker
from policies.document import PolicyDocument, Route, When
from policies.profile import (
    OPENAI_DEFAULTS,
    Bypass,
    RequestProfile,
    SamplingDefaults,
    bypass_reasons,
)

# The one alias that follows the fleet: a client that only wants an answer may always ask for it.
ANY_MODEL = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The route that takes a request, and what keeps the request from speculation."""

    route: Route
    bypass: tuple[Bypass, ...]


def resolve_model(policy: PolicyDocument, asked: str, served: Set[str]) -> str:
    """Turn the name a client used into the name of a model; unknown names come back unchanged."""
    if asked in served or asked in policy.models:
        return asked
    target = next((name for name, model in policy.models.items() if asked in model.aliases), asked)
    if asked == ANY_MODEL and target not in served and len(served) == 1:
        return next(iter(served))
    return target


def sampling_defaults(policy: PolicyDocument, model: str) -> SamplingDefaults:
    """Say what stands in for sampling fields that a request to this model leaves out."""
    entry = policy.models.get(model)
    return entry.sampling.defaults if entry else OPENAI_DEFAULTS


def judge(
    policy: PolicyDocument,
    profile: RequestProfile,
    asker: Asker = SOMEBODY,  # no condition looks at it yet
) -> Verdict:
    """Find the first route whose conditions hold; the last route always does."""
    bypass = bypass_reasons(profile)
    for route in policy.routes[:-1]:
        if _holds(route.when, profile, bypass):
            return Verdict(route=route, bypass=bypass)
    return Verdict(route=policy.routes[-1], bypass=bypass)


def _holds(when: When, profile: RequestProfile, bypass: tuple[Bypass, ...]) -> bool:
    return (
        (when.media is None or when.media == (profile.media_count > 0))
        and (when.mtp_eligible is None or when.mtp_eligible == (not bypass))
        and (when.model is None or when.model == profile.model)
        and (when.greedy is None or when.greedy == profile.sampling.greedy)
        and (when.stream is None or when.stream == profile.stream)
    )
