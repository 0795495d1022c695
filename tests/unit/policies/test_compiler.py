"""Conditions of routes: which requests, callers and times match.

A naive reading of every condition is the model for the compiled one.
"""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.request.profile import Endpoint, RequestProfile, Sampling, bypass_reasons
from policies.compiler import ANONYMOUS, CallerAttributes
from policies.document import PolicyDocument
from policies.evaluate import match_route
from policies.routes import DAYS
from policies.sections import MEDIA_KINDS
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


NAMES = st.sampled_from(["a", "b", "demo"])
SOME_NAMES = NAMES | st.lists(NAMES, min_size=1, max_size=3)
FLAGS = st.booleans()
NUMBERS = st.integers(0, 6)
RANGES = st.tuples(NUMBERS, NUMBERS).flatmap(
    lambda ends: st.sampled_from(
        [
            {"at_least": min(ends)},
            {"at_most": max(ends)},
            {"at_least": min(ends), "at_most": max(ends)},
        ]
    )
)
CLOCKS = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.sampled_from([0, 1, 59]))
HOURS = st.tuples(CLOCKS, CLOCKS | st.just("24:00")).filter(lambda ends: ends[0] != ends[1])
FEATURES = ["tools", "structured_output", "logprobs", "multiple_choices", "logits_processors"]
WHENS = st.fixed_dictionaries(
    {},
    optional={
        "media": FLAGS | st.lists(st.sampled_from(MEDIA_KINDS), min_size=1, max_size=2),
        **dict.fromkeys(("mtp_eligible", "greedy", "stream"), FLAGS),
        "features": st.dictionaries(
            st.sampled_from([*FEATURES, "thinking_budget"]), FLAGS, min_size=1
        ),
        **dict.fromkeys(("prompt_chars", "max_tokens", "messages"), RANGES),
        **dict.fromkeys(("model", "key", "team"), SOME_NAMES),
        "header": st.dictionaries(st.sampled_from(["x-a", "x-b"]), SOME_NAMES, min_size=1),
        "hours": HOURS.map("-".join),
        "days": st.lists(st.sampled_from(DAYS), min_size=1, max_size=4),
    },
).filter(bool)
PROFILES = st.builds(
    RequestProfile,
    endpoint=st.just(Endpoint.CHAT),
    model=NAMES,
    stream=FLAGS,
    media=st.dictionaries(st.sampled_from(MEDIA_KINDS), st.integers(1, 2)).map(
        lambda counts: tuple(sorted(counts.items()))
    ),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1.0]),
        top_k=st.integers(0, 1),
        presence_penalty=st.sampled_from([0.0, 1.0]),
    ),
    max_tokens=st.none() | NUMBERS,
    choices=st.integers(1, 2),
    top_logprobs=st.none() | st.integers(0, 1),
    tools=FLAGS,
    structured_output=FLAGS,
    thinking_budget=st.none() | st.integers(0, 1),
    messages=NUMBERS,
    text_chars=NUMBERS,
)
CALLERS = st.builds(
    CallerAttributes,
    key=NAMES | st.just(""),
    team=NAMES | st.just(""),
    headers=st.dictionaries(st.sampled_from(["x-a", "x-b"]), NAMES),
    minute_of_week=st.integers(0, 7 * DAY - 1),
)


@given(st.lists(WHENS, max_size=8), PROFILES, CALLERS)
def test_a_compiled_policy_matches_the_same_route_as_a_naive_reading(
    whens: list[dict[str, Any]], profile: RequestProfile, attributes: CallerAttributes
) -> None:
    matching = (
        f"route-{i}" for i, when in enumerate(whens) if matches_naively(when, profile, attributes)
    )
    assert match_route(policy_with_conditions(*whens), profile, attributes).route.name == next(
        matching, "rest"
    )


def matches_naively(
    when: dict[str, Any], profile: RequestProfile, attributes: CallerAttributes
) -> bool:
    """Evaluate one condition after the other, as the page for admins describes them."""
    kinds = {kind for kind, _ in profile.media}
    media = when.get("media", bool(kinds))
    flags = {
        "mtp_eligible": not bypass_reasons(profile),
        "greedy": profile.sampling.greedy,
        "stream": profile.stream,
    }
    features = {
        "tools": profile.tools,
        "structured_output": profile.structured_output,
        "logprobs": profile.top_logprobs is not None,
        "multiple_choices": profile.choices > 1,
        "logits_processors": profile.sampling.reshapes_logits,
        "thinking_budget": profile.thinking_budget is not None,
    }
    numbers = {
        "prompt_chars": profile.text_chars,
        "max_tokens": math.inf if profile.max_tokens is None else profile.max_tokens,
        "messages": profile.messages,
    }
    names = {"model": profile.model, "key": attributes.key, "team": attributes.team}
    hours, days = when.get("hours", "00:00-24:00"), when.get("days", DAYS)
    return (
        (
            media is None
            or (bool(kinds) == media if isinstance(media, bool) else bool(kinds & {*media}))
        )
        and all(when.get(name, value) == value for name, value in flags.items())
        and all(features[name] == expected for name, expected in when.get("features", {}).items())
        and all(
            bounds.get("at_least", 0) <= numbers[name] <= bounds.get("at_most", math.inf)
            for name, bounds in when.items()
            if name in numbers
        )
        and all(value in as_list(when.get(name, value)) for name, value in names.items())
        and all(
            attributes.headers.get(name) in as_list(expected)
            for name, expected in when.get("header", {}).items()
        )
        and is_open(hours, days, attributes.minute_of_week)
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_open(hours: str, days: Any, minute_of_week: int) -> bool:
    """List the minutes from opening to closing on each day, and look for the current one."""
    first, end = (int(clock[:2]) * 60 + int(clock[3:]) for clock in hours.split("-"))
    open_minutes = range(first, end if first < end else end + DAY)
    return any(
        ([*DAYS].index(day) * DAY + minute) % (7 * DAY) == minute_of_week
        for day in days
        for minute in open_minutes
    )
