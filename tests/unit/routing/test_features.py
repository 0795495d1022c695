"""Features that not every engine takes, and models that an engine would have to load."""

from random import Random

import pytest

from gateway.routing.features import Feature, features_of
from gateway.routing.select import Decision, RoutingRequest, decide
from gateway.routing.view import ModelView, WorkerView
from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.document import default_policy
from tests.support.fleet_views import fleet_view, view_of
from tests.support.policies import make_policy
from tests.support.request_profiles import GREEDY, SAMPLED
from tests.support.scripted_worker import lane_report

BLIND = ModelView(frozenset((Feature.IMAGE, Feature.CHOICES)))
PICTURE = SAMPLED._replace(media=(("image", 2),))


def engine(
    name: str, view: ModelView | None = None, models: tuple[str, ...] = ("demo",)
) -> WorkerView:
    """Return a worker whose model differs as the view says."""
    lanes = lane_report("text-mtp"), lane_report("vlm")
    return view_of(name, *lanes, models=models, by_model={"demo": view} if view else {})


def decision(profile: RequestProfile, *workers: WorkerView) -> Decision:
    return decide(RoutingRequest(default_policy(), profile), fleet_view(*workers), 0.0, Random(1))


def chosen(profile: RequestProfile, *workers: WorkerView) -> set[str]:
    return {one.worker_id for one in decision(profile, *workers).candidates}


def test_a_request_goes_to_the_workers_that_take_what_it_asks_for() -> None:
    fleet = engine("blind", BLIND), engine("seeing")
    assert chosen(PICTURE, *fleet) == {"seeing"}
    assert chosen(SAMPLED, *fleet) == {"blind", "seeing"}
    assert chosen(SAMPLED._replace(choices=2), *fleet) == {"seeing"}
    refused = decision(PICTURE, fleet[0])
    assert not refused.candidates
    assert refused.lacking == {Feature.IMAGE}
    assert not decision(SAMPLED, fleet[0]).lacking


def test_prescribed_calls_go_first_to_a_worker_that_makes_them() -> None:
    """The gateway checks the answer of an engine that may ignore them."""
    loose = engine("loose", ModelView(frozenset((Feature.CALLS,))))
    prescribed = SAMPLED._replace(tools=True, call_fields=("tool_choice",))
    assert chosen(prescribed, loose, engine("strict")) == {"strict"}
    assert chosen(prescribed, loose) == {"loose"}
    blind = engine("blind", ModelView(frozenset((Feature.CALLS, Feature.IMAGE))))
    assert chosen(prescribed._replace(media=(("image", 1),)), loose, blind) == {"loose"}
    assert chosen(SAMPLED._replace(tools=True), loose, engine("strict")) == {"loose", "strict"}


def test_prescribed_calls_prefer_a_worker_of_a_later_pool() -> None:
    loose, strict = (
        view_of(name, lane_report(lane), by_model=by_model)
        for name, lane, by_model in (
            ("loose", "vlm", {"demo": ModelView(frozenset((Feature.CALLS,)))}),
            ("strict", "text-mtp", {}),
        )
    )
    profile = GREEDY._replace(tools=True, call_fields=("tool_choice",))
    pools = {name: {"lanes": [name]} for name in ("vlm", "text-mtp")}
    policy = make_policy([{"name": "all", "to": ["vlm", "text-mtp"]}], pools)
    found = decide(RoutingRequest(policy, profile), fleet_view(loose, strict), 0.0, Random(1))
    assert [one.worker_id for one in found.candidates] == ["strict", "loose"]


def test_a_model_that_must_be_loaded_first_costs_that_time() -> None:
    cold = engine("cold", ModelView(load_s=7.0), ("demo", "other"))
    first, second = decision(SAMPLED, cold, engine("warm")).candidates
    assert (first.worker_id, second.worker_id) == ("warm", "cold")
    assert second.score_s - first.score_s == pytest.approx(7.0)
    other = decision(SAMPLED._replace(model="other"), cold).candidates[0]
    assert second.score_s - other.score_s == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("profile", "feature"),
    [
        (GREEDY._replace(endpoint=Endpoint.COMPLETIONS), Feature.COMPLETIONS),
        (GREEDY._replace(media=(("audio", 1),)), Feature.AUDIO),
        (GREEDY._replace(tools=True), Feature.TOOLS),
        (GREEDY._replace(call_fields=("tool_choice",)), Feature.CALLS),
        (GREEDY._replace(exact=True), Feature.EXACT),
        (GREEDY._replace(structured_output=True), Feature.STRUCTURED_OUTPUT),
        (GREEDY._replace(top_logprobs=0), Feature.LOGPROBS),
        (GREEDY._replace(stop=("x",)), Feature.STOP),
        (SAMPLED._replace(sampling=Sampling(top_k=5)), Feature.TOP_K),
        (SAMPLED._replace(sampling=Sampling(min_p=0.1)), Feature.MIN_P),
        (GREEDY._replace(sampling=Sampling(repetition_penalty=1.1)), Feature.REPETITION_PENALTY),
    ],
)
def test_each_feature_is_seen_in_a_request(profile: RequestProfile, feature: Feature) -> None:
    assert feature in features_of(profile)
    assert feature not in features_of(GREEDY)


def test_a_sampler_field_that_changes_no_greedy_answer_is_no_feature() -> None:
    assert not features_of(GREEDY._replace(sampling=Sampling(temperature=0, top_k=5, min_p=0.5)))
