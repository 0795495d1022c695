"""Conditions of routes: which requests, callers and times match."""

from typing import Any

import pytest

from paceline.request.profile import Endpoint, RequestProfile, Sampling
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument
from policies.evaluate import match_route
from policies.routes import DAYS
from tests.support.policies import DEFAULT_ROUTE, make_policy

PLAIN = RequestProfile(endpoint=Endpoint.CHAT, model="demo", messages=1)
GREEDY = PLAIN._replace(sampling=Sampling(temperature=0))
DAY = 24 * 60


def policy_with_conditions(*conditions: dict[str, Any]) -> PolicyDocument:
    """Return a policy with a route for each condition, and a last route for the rest."""
    routes = [
        {"name": f"route-{index}", "when": condition, "to": "vlm"}
        for index, condition in enumerate(conditions)
    ]
    return make_policy([*routes, DEFAULT_ROUTE], {"vlm": {"lanes": "vlm"}})


def matches(when: dict[str, Any], given: RequestProfile | CallerAttributes) -> bool:
    policy = policy_with_conditions(when)
    if isinstance(given, RequestProfile):
        return match_route(policy, given).route.name == "route-0"
    return match_route(policy, PLAIN, given).route.name == "route-0"


def at(day: str, hour: int, minute: int = 0) -> CallerAttributes:
    return CallerAttributes(minute_of_week=[*DAYS].index(day) * DAY + hour * 60 + minute)  # type: ignore[arg-type]


def with_headers(**headers: str) -> CallerAttributes:
    return CallerAttributes(headers={f"x-{name}": value for name, value in headers.items()})


WITH_PICTURE = PLAIN._replace(media=(("image", 1),))
WITH_BOTH = PLAIN._replace(media=(("audio", 1), ("image", 2)))
LONG = PLAIN._replace(text_chars=5000, max_tokens=100, messages=9)
WITH_TOOLS = PLAIN._replace(tools=True)
PENALISED = PLAIN._replace(sampling=Sampling(presence_penalty=0.1))


@pytest.mark.parametrize(
    ("when", "matching", "other"),
    [
        ({"media": True}, WITH_PICTURE, PLAIN),
        ({"media": False}, PLAIN, WITH_PICTURE),
        ({"media": "image"}, WITH_BOTH, PLAIN),
        ({"media": ["video", "image"]}, WITH_PICTURE, PLAIN._replace(media=(("file", 1),))),
        ({"mtp_eligible": True}, GREEDY, PLAIN),
        ({"mtp_eligible": False}, PLAIN, GREEDY),
        ({"greedy": True}, GREEDY._replace(choices=2), PLAIN),
        ({"greedy": False}, PLAIN, PLAIN._replace(sampling=Sampling(top_k=1))),
        ({"stream": True}, PLAIN._replace(stream=True), PLAIN),
        ({"features": {"tools": True}}, WITH_TOOLS, PLAIN),
        ({"features": {"tools": False}}, PLAIN, WITH_TOOLS),
        ({"features": {"structured_output": True}}, PLAIN._replace(structured_output=True), PLAIN),
        ({"features": {"logprobs": True}}, PLAIN._replace(top_logprobs=0), PLAIN),
        ({"features": {"multiple_choices": True}}, PLAIN._replace(choices=2), PLAIN),
        ({"features": {"logits_processors": True}}, PENALISED, PLAIN),
        ({"features": {"thinking_budget": True}}, PLAIN._replace(thinking_budget=0), PLAIN),
        (
            {"features": {"tools": True, "logprobs": False}},
            WITH_TOOLS,
            WITH_TOOLS._replace(top_logprobs=1),
        ),
        ({"prompt_chars": {"at_least": 5000}}, LONG, LONG._replace(text_chars=4999)),
        ({"prompt_chars": {"at_most": 5000}}, LONG, LONG._replace(text_chars=5001)),
        ({"messages": {"at_least": 2, "at_most": 9}}, LONG, LONG._replace(messages=10)),
        ({"max_tokens": {"at_most": 100}}, LONG, LONG._replace(max_tokens=101)),
        ({"max_tokens": {"at_most": 2**40}}, LONG, PLAIN),
        ({"max_tokens": {"at_least": 2**40}}, PLAIN, LONG),
        ({"model": "demo"}, PLAIN, PLAIN._replace(model="other")),
        ({"model": ["a", "demo"]}, PLAIN, PLAIN._replace(model="b")),
        ({"greedy": True, "model": "demo", "stream": False}, GREEDY, PLAIN),
        ({"greedy": True, "model": "demo"}, GREEDY, GREEDY._replace(model="other")),
        ({"key": "night-job"}, CallerAttributes(key="night-job"), ANONYMOUS),
        ({"key": ["a", "b"]}, CallerAttributes(key="b"), CallerAttributes(key="c")),
        ({"team": "research"}, CallerAttributes(team="research"), CallerAttributes(key="research")),
        ({"team": "a", "model": "demo"}, CallerAttributes(team="a"), ANONYMOUS),
        ({"header": {"x-tier": "gold"}}, with_headers(tier="gold"), ANONYMOUS),
        ({"header": {"x-tier": "gold"}}, with_headers(tier="gold"), CallerAttributes(team="gold")),
        (
            {"header": {"x-tier": ["gold", "silver"], "x-app": "ci"}},
            with_headers(tier="silver", app="ci"),
            with_headers(tier="gold"),
        ),
        ({"hours": "09:00-17:00"}, at("mon", 9), at("mon", 8, 59)),
        ({"hours": "09:00-17:00"}, at("sun", 16, 59), at("sun", 17)),
        ({"hours": "22:00-06:00"}, at("tue", 23, 59), at("tue", 6)),
        ({"hours": "22:00-06:00"}, at("mon", 0), at("mon", 21, 59)),
        ({"hours": "22:00-24:00"}, at("mon", 23), at("tue", 0)),
        ({"hours": "22:00-00:00"}, at("mon", 23), at("tue", 0)),
        ({"days": ["sat", "sun"]}, at("sun", 23, 59), at("mon", 0)),
        ({"days": "mon"}, at("mon", 0), at("sun", 23, 59)),
        ({"days": "fri", "hours": "22:00-06:00"}, at("sat", 5, 59), at("fri", 5, 59)),
        ({"days": "sun", "hours": "22:00-06:00"}, at("mon", 1), at("sun", 1)),
        ({"days": "fri", "hours": "00:00-24:00"}, at("fri", 23, 59), at("sat", 0)),
    ],
)
def test_a_condition_on_the_request_the_caller_or_the_time(when, matching, other) -> None:
    assert matches(when, matching)
    assert not matches(when, other)


def test_the_first_matching_route_decides() -> None:
    policy = policy_with_conditions({"team": "a"}, {"greedy": True}, {"model": "demo"})
    assert match_route(policy, GREEDY).route.name == "route-1"
    assert match_route(policy, GREEDY, CallerAttributes(team="a")).route.name == "route-0"
    assert match_route(policy, PLAIN).route.name == "route-2"
    assert match_route(policy, PLAIN._replace(model="x")).route.name == "rest"


def test_a_compiled_policy_lists_each_header_of_its_conditions_once() -> None:
    policy = policy_with_conditions({"header": {"x-b": "1"}}, {"header": {"x-a": "1", "x-b": "2"}})
    assert policy.compiled.headers == ("x-a", "x-b")
