"""Model names, sampling defaults and routes of a policy."""

import pytest

from paceline.request.profile import Sampling
from policies.document import default_policy
from policies.evaluate import resolve_model, sampling_defaults
from tests.support.policies import make_policy

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
