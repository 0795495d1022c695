"""What is kept of system prompts: the same answer, and most of the prompt not read again."""

import pytest

from policies.profile import Bypass
from tests.engine.conftest import run
from workers.engine.lane import Lane
from workers.engine.requests import LaneName
from workers.engine.snapshots import Snapshots

SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 20
OTHER = "Be brief. " + "The blue boat finds the warm stone. " * 20
QUESTIONS = ["Hello", "What is 2 + 2?", "Tell me a story about a fox.", "Who are you?"]


@pytest.fixture
def snapshots() -> Snapshots:
    return Snapshots(1 << 30)


@pytest.mark.parametrize("name", list(LaneName))
def test_a_hit_gives_the_answer_and_the_counts_of_a_miss(make_lane, ask, snapshots, name) -> None:
    for question in QUESTIONS:
        cold_lane = make_lane(name)
        cold = ask(cold_lane, question, system=SYSTEM)
        run(cold_lane)
        warm_lane = make_lane(name, snapshots=snapshots)
        warm = ask(warm_lane, question, system=SYSTEM)
        run(warm_lane)

        assert warm.row.answer == cold.row.answer
        assert warm.row.tally.total() == cold.row.tally.total()
    assert (snapshots.counts.hits, snapshots.counts.misses) == (len(QUESTIONS) - 1, 1)


def test_cached_tokens_are_those_that_were_not_read(make_lane, ask, snapshots) -> None:
    lane = make_lane(snapshots=snapshots)
    first = ask(lane, "Hello", system=SYSTEM)
    second = ask(lane, "Who are you?", system=SYSTEM)
    run(lane)

    prefix = first.row.prompt.prefix
    assert prefix is not None
    assert first.end.usage.cached_tokens == 0
    assert second.end.usage.cached_tokens == prefix.tokens > 32
    assert second.row.prompt.tokens[: prefix.tokens] == first.row.prompt.tokens[: prefix.tokens]


def test_rows_that_start_from_one_snapshot_do_not_touch_each_other(
    make_lane, ask, snapshots
) -> None:
    lane = make_lane(snapshots=snapshots)
    together = [ask(lane, question, system=SYSTEM) for question in QUESTIONS]
    run(lane)
    alone = []
    for question in QUESTIONS:
        other = make_lane()
        alone.append(ask(other, question, system=SYSTEM))
        run(other)

    assert [one.row.answer for one in together] == [one.row.answer for one in alone]


def test_a_plain_rows_snapshot_serves_a_drafting_row(make_lane, ask, snapshots) -> None:
    lane = make_lane(snapshots=snapshots)
    ask(lane, "Hello", system=SYSTEM, bypass=(Bypass.LOGPROBS,))
    run(lane)
    warm = ask(lane, "Who are you?", system=SYSTEM)
    run(lane)
    cold_lane = make_lane()
    cold = ask(cold_lane, "Who are you?", system=SYSTEM)
    run(cold_lane)

    assert warm.row.cached_tokens > 0
    assert warm.row.tally.total() == cold.row.tally.total()


def test_two_lanes_read_a_prefix_once_between_them(make_lane, ask, snapshots) -> None:
    lanes: list[Lane] = []
    for name in LaneName:
        lane = make_lane(name, snapshots=snapshots, chunk_tokens=32)
        lane._siblings = lanes
        lanes.append(lane)
    heard = [ask(lane, "Hello", system=SYSTEM) for lane in lanes]
    while any(lane.busy for lane in lanes):
        for lane in lanes:
            lane.step()

    assert [one.row.cached_tokens > 0 for one in heard] == [False, True]
    assert snapshots.counts.misses == 1


def test_a_key_that_stands_for_other_tokens_is_a_miss(make_lane, ask, snapshots) -> None:
    lane = make_lane(snapshots=snapshots)
    ask(lane, "Hello", system=SYSTEM)
    run(lane)
    liar = ask(lane, "Hello", system=OTHER)
    honest = liar.row.prompt.prefix
    (key,) = snapshots._by_key
    object.__setattr__(honest, "key", key)
    run(lane)

    assert liar.row.cached_tokens == 0


def test_least_recently_used_snapshots_go_when_memory_is_full(make_lane, ask) -> None:
    measured = Snapshots(1 << 30)
    lane = make_lane(snapshots=measured)
    ask(lane, "Hello", system=SYSTEM)
    run(lane)
    small = Snapshots(int(measured.size_bytes * 1.5))
    lane = make_lane(snapshots=small)
    for system in (SYSTEM, OTHER, SYSTEM):
        ask(lane, "Hello", system=system)
        run(lane)

    assert (small.counts.hits, small.counts.evicted) == (0, 2)
    assert small.size_bytes <= measured.size_bytes * 1.5


def test_prompts_without_a_system_message_share_nothing(make_lane, ask, snapshots) -> None:
    lane = make_lane(snapshots=snapshots)
    heard = ask(lane, "Tell me a story. " * 40)
    run(lane)

    assert heard.row.prompt.prefix is None
    assert snapshots.size_bytes == 0
