"""What is compiled of a policy, against a naive reading of every condition."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from policies.compiler import Asker
from policies.evaluate import judge
from policies.request.profile import Endpoint, RequestProfile, Sampling, bypass_reasons
from policies.routes import DAYS, MEDIA_KINDS
from tests.support.policy_conditions import DAY, policy_of

NAMES = st.sampled_from(["a", "b", "demo"])
SOME_NAMES = NAMES | st.lists(NAMES, min_size=1, max_size=3)
FLAGS = st.booleans()
NUMBERS = st.integers(0, 6)
RANGES = (
    st.tuples(NUMBERS, NUMBERS)
    .map(sorted)
    .flatmap(
        lambda ends: st.sampled_from(
            [
                {"at_least": ends[0]},
                {"at_most": ends[1]},
                {"at_least": ends[0], "at_most": ends[1]},
            ]
        )
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
ASKERS = st.builds(
    Asker,
    key=NAMES | st.just(""),
    team=NAMES | st.just(""),
    headers=st.dictionaries(st.sampled_from(["x-a", "x-b"]), NAMES),
    minute_of_week=st.integers(0, 7 * DAY - 1),
)


@given(st.lists(WHENS, max_size=8), PROFILES, ASKERS)
def test_what_is_compiled_decides_as_one_reads_it(
    whens: list[dict[str, Any]], profile: RequestProfile, asker: Asker
) -> None:
    reading = (f"route-{i}" for i, when in enumerate(whens) if read_naively(when, profile, asker))
    assert judge(policy_of(*whens), profile, asker).route.name == next(reading, "rest")


def read_naively(when: dict[str, Any], profile: RequestProfile, asker: Asker) -> bool:
    """Read one condition after the other, as the page for admins tells them."""
    kinds = {kind for kind, _ in profile.media}
    media = when.get("media")
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
        "max_tokens": float("inf") if profile.max_tokens is None else profile.max_tokens,
        "messages": profile.messages,
    }
    names = {"model": profile.model, "key": asker.key, "team": asker.team}
    wanted_headers = when.get("header", {})
    return all(
        (
            media is None
            or (bool(kinds) == media if isinstance(media, bool) else kinds & {*media}),
            all(when.get(name, value) == value for name, value in flags.items()),
            all(features[name] == want for name, want in when.get("features", {}).items()),
            all(
                when.get(name, {}).get("at_least", 0)
                <= value
                <= when.get(name, {}).get("at_most", float("inf"))
                for name, value in numbers.items()
            ),
            all(value in as_list(when.get(name, value)) for name, value in names.items()),
            all(asker.headers.get(name) in as_list(want) for name, want in wanted_headers.items()),
            is_open(when.get("hours", "00:00-24:00"), when.get("days", DAYS), asker.minute_of_week),
        )
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_open(hours: str, days: Any, minute_of_week: int) -> bool:
    """Walk back from now to the minute at which the hours last began, and look at its day."""
    first, end = hours.split("-")
    open_minutes: set[int] = set()
    minute = minutes_of(first)
    while minute % DAY != minutes_of(end) % DAY or not open_minutes:
        open_minutes.add(minute)
        minute += 1
    return any(
        ([*DAYS].index(day) * DAY + minute) % (7 * DAY) == minute_of_week
        for day in days
        for minute in open_minutes
    )


def minutes_of(clock: str) -> int:
    return int(clock[:2]) * 60 + int(clock[3:])
