"""Conditions of routes: which requests, which askers and which minutes each one takes."""

from __future__ import annotations

from typing import Any

import pytest

from policies.compiler import SOMEBODY, Asker
from policies.evaluate import judge
from policies.request.profile import Endpoint, RequestProfile, Sampling
from policies.routes import DAYS
from tests.support.policy_conditions import DAY, policy_of

PLAIN = RequestProfile(endpoint=Endpoint.CHAT, model="demo", messages=1)
GREEDY = PLAIN._replace(sampling=Sampling(temperature=0))


def holds(when: dict[str, Any], profile: RequestProfile, asker: Asker = SOMEBODY) -> bool:
    return judge(policy_of(when), profile, asker).route.name == "route-0"


WITH_PICTURE = PLAIN._replace(media=(("image", 1),))
WITH_BOTH = PLAIN._replace(media=(("audio", 1), ("image", 2)))
MUCH = PLAIN._replace(text_chars=5000, max_tokens=100, messages=9)


@pytest.mark.parametrize(
    ("when", "taken", "left"),
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
        ({"features": {"tools": True}}, PLAIN._replace(tools=True), PLAIN),
        ({"features": {"tools": False}}, PLAIN, PLAIN._replace(tools=True)),
        (
            {"features": {"structured_output": True}},
            PLAIN._replace(structured_output=True),
            PLAIN,
        ),
        ({"features": {"logprobs": True}}, PLAIN._replace(top_logprobs=0), PLAIN),
        ({"features": {"multiple_choices": True}}, PLAIN._replace(choices=2), PLAIN),
        (
            {"features": {"logits_processors": True}},
            PLAIN._replace(sampling=Sampling(presence_penalty=0.1)),
            PLAIN,
        ),
        ({"features": {"thinking_budget": True}}, PLAIN._replace(thinking_budget=0), PLAIN),
        (
            {"features": {"tools": True, "logprobs": False}},
            PLAIN._replace(tools=True),
            PLAIN._replace(tools=True, top_logprobs=1),
        ),
        ({"prompt_chars": {"at_least": 5000}}, MUCH, MUCH._replace(text_chars=4999)),
        ({"prompt_chars": {"at_most": 5000}}, MUCH, MUCH._replace(text_chars=5001)),
        (
            {"messages": {"at_least": 2, "at_most": 9}},
            MUCH,
            MUCH._replace(messages=10),
        ),
        ({"max_tokens": {"at_most": 100}}, MUCH, MUCH._replace(max_tokens=101)),
        ({"max_tokens": {"at_most": 2**40}}, MUCH, PLAIN),
        ({"max_tokens": {"at_least": 2**40}}, PLAIN, MUCH),
        ({"model": "demo"}, PLAIN, PLAIN._replace(model="other")),
        ({"model": ["a", "demo"]}, PLAIN, PLAIN._replace(model="b")),
    ],
)
def test_a_condition_on_the_request(
    when: dict[str, Any], taken: RequestProfile, left: RequestProfile
) -> None:
    assert holds(when, taken)
    assert not holds(when, left)


@pytest.mark.parametrize(
    ("when", "taken", "left"),
    [
        ({"key": "night-job"}, Asker(key="night-job"), SOMEBODY),
        ({"key": ["a", "b"]}, Asker(key="b"), Asker(key="c")),
        ({"team": "research"}, Asker(team="research"), Asker(key="research")),
        ({"header": {"x-tier": "gold"}}, Asker(headers={"x-tier": "gold"}), SOMEBODY),
        (
            {"header": {"x-tier": ["gold", "silver"], "x-app": "ci"}},
            Asker(headers={"x-tier": "silver", "x-app": "ci"}),
            Asker(headers={"x-tier": "gold"}),
        ),
        ({"header": {"x-tier": "gold"}}, Asker(headers={"x-tier": "gold"}), Asker(team="gold")),
    ],
)
def test_a_condition_on_who_asks(when: dict[str, Any], taken: Asker, left: Asker) -> None:
    assert holds(when, PLAIN, taken)
    assert not holds(when, PLAIN, left)


def at(day: str, hour: int, minute: int = 0) -> Asker:
    return Asker(minute_of_week=[*DAYS].index(day) * DAY + hour * 60 + minute)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("when", "taken", "left"),
    [
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
def test_a_condition_on_the_time(when: dict[str, Any], taken: Asker, left: Asker) -> None:
    assert holds(when, PLAIN, taken)
    assert not holds(when, PLAIN, left)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ({"greedy": True, "model": "demo", "stream": False}, True),
        ({"greedy": True, "model": "other"}, False),
        ({"greedy": True, "team": "a"}, False),
    ],
)
def test_all_conditions_of_a_route_must_hold(when: dict[str, Any], expected: bool) -> None:
    assert holds(when, GREEDY) is expected


def test_the_first_route_that_holds_decides() -> None:
    policy = policy_of({"team": "a"}, {"greedy": True}, {"model": "demo"})
    assert judge(policy, GREEDY).route.name == "route-1"
    assert judge(policy, GREEDY, Asker(team="a")).route.name == "route-0"
    assert judge(policy, PLAIN).route.name == "route-2"
    assert judge(policy, PLAIN._replace(model="x")).route.name == "rest"


def test_the_headers_that_a_policy_asks_for_are_known_once_each() -> None:
    policy = policy_of({"header": {"x-b": "1"}}, {"header": {"x-a": "1", "x-b": "2"}})
    assert policy.compiled.headers == ("x-a", "x-b")
