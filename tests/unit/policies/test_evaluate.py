"""Names, defaults and routes, as the policy gives them."""

from __future__ import annotations

from typing import Any

import pytest

from policies.document import default_policy, read_policy
from policies.evaluate import match_route, resolve_model, sampling_defaults
from policies.request.profile import Bypass, RequestProfile
from tests.support.request_profiles import GREEDY, SAMPLED

POLICY = default_policy()


@pytest.mark.parametrize(
    ("asked", "served", "meant"),
    [
        ("demo", {"demo"}, "demo"),
        ("default", {"demo"}, "demo"),
        ("gpt-4o-mini", {"demo"}, "demo"),
        ("default", {"demo", "qwen"}, "demo"),
        ("default", {"qwen"}, "qwen"),
        ("default", {"qwen", "llama"}, "demo"),
        ("default", set(), "demo"),
        ("gpt-4o-mini", {"qwen"}, "demo"),
        ("gpt-4o-mini", {"gpt-4o-mini"}, "gpt-4o-mini"),
        ("unknown", {"demo"}, "unknown"),
    ],
)
def test_a_name_means_one_model(asked: str, served: set[str], meant: str) -> None:
    assert resolve_model(POLICY, asked, served) == meant


def test_default_follows_the_fleet_without_being_listed() -> None:
    policy = policy_of([{"name": "all", "to": ["vlm"]}])
    assert resolve_model(policy, "default", {"qwen"}) == "qwen"
    assert resolve_model(policy, "default", {"a", "b"}) == "default"


def test_defaults_are_the_models_own_or_openais() -> None:
    policy = policy_of([{"name": "all", "to": ["vlm"]}], m={"sampling": {"temperature": 0}})
    assert sampling_defaults(policy, "m").temperature == 0
    assert sampling_defaults(policy, "other").temperature == 1.0


@pytest.mark.parametrize(
    ("profile", "route", "bypass"),
    [
        (GREEDY, "greedy-text", ()),
        (SAMPLED, "everything-else", (Bypass.NON_GREEDY_SAMPLING,)),
        (GREEDY._replace(media=(("image", 1),)), "pictures", (Bypass.MEDIA,)),
        (
            SAMPLED._replace(media=(("video", 1),)),
            "pictures",
            (Bypass.MEDIA, Bypass.NON_GREEDY_SAMPLING),
        ),
        (GREEDY._replace(choices=2), "everything-else", (Bypass.MULTIPLE_CHOICES,)),
    ],
)
def test_the_shipped_routes(
    profile: RequestProfile, route: str, bypass: tuple[Bypass, ...]
) -> None:
    verdict = match_route(POLICY, profile)
    assert (verdict.route.name, verdict.bypass) == (route, bypass)


def policy_of(routes: list[dict[str, Any]], **models: Any) -> Any:
    pools = {"vlm": {"lanes": ["vlm"]}}
    return read_policy({"version": 1, "models": models, "routes": routes, "pools": pools}, "test")
