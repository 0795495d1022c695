"""Model names, sampling defaults and routes of a policy."""

import pytest

from paceline.request.profile import Bypass, RequestProfile, Sampling
from policies.document import default_policy
from policies.evaluate import match_route, resolve_model, sampling_defaults
from tests.support.policies import make_policy
from tests.support.request_profiles import GREEDY, SAMPLED

POLICY = default_policy()


@pytest.mark.parametrize(
    ("name", "served", "resolved"),
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
def test_a_name_resolves_to_one_model(name: str, served: set[str], resolved: str) -> None:
    assert resolve_model(POLICY, name, served) == resolved


def test_a_policy_overrides_what_workers_report_field_by_field_or_else_openais_defaults() -> None:
    policy = make_policy(
        "vlm", {"vlm": {"lanes": "vlm"}}, models={"m": {"sampling": {"temperature": 0}}}
    )
    assert resolve_model(policy, "default", {"qwen"}) == "qwen"
    assert resolve_model(policy, "default", {"a", "b"}) == "default"
    assert sampling_defaults(policy, "m").temperature == 0
    assert sampling_defaults(policy, "other").temperature == 1.0
    reported = {"m": Sampling(temperature=0.6, top_k=20), "other": Sampling(top_p=0.9)}
    assert sampling_defaults(policy, "m", reported) == Sampling(temperature=0, top_k=20)
    assert sampling_defaults(policy, "other", reported) == Sampling(top_p=0.9)


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
def test_shipped_routes(profile: RequestProfile, route: str, bypass: tuple[Bypass, ...]) -> None:
    match = match_route(POLICY, profile)
    assert (match.route.name, match.bypass) == (route, bypass)
