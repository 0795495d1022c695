"""Which workers have cached which prompts: when claims expire or are disproved, and how they affect
routing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing import prefix_affinity
from gateway.routing.prefix_affinity import (
    EVICTED,
    ISOLATED,
    NOTHING_EXPECTED,
    OTHER_MAC,
    ExpectedReuse,
    PrefixClaim,
    PrefixIndex,
)
from gateway.routing.prefix_keys import PrefixKeys
from gateway.routing.select import RoutingRequest, decide
from gateway.routing.view import FleetView, LaneView, WorkerView
from gateway.types import Usage, WorkerBoot
from policies.document import default_policy
from policies.sections import PrefixPolicy
from tests.support.fake_clock import START_S, FakeClock
from tests.support.prefix_claims import (
    LAPTOP,
    RULES,
    STUDIO,
    cached_at,
    conversation,
    key_of,
    prefix_holders,
    system_prompt,
)
from tests.support.request_profiles import SAMPLED
from tests.support.scripted_worker import ScriptedWorker, lane_report
from workers.protocol import WorkerReport

MINI = ("mini", "1")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def prefixes(clock: FakeClock) -> PrefixIndex:
    return PrefixIndex(clock)


def turn(
    prefixes: PrefixIndex, prefix: PrefixKeys, boot: WorkerBoot, prompt: int, cached: int
) -> str:
    """Send one request and receive its usage; return why earlier turns were read again."""
    expected = prefixes.record_dispatch(prefix, boot, RULES)
    return prefixes.record_usage(prefix, boot, Usage(prompt, 5, cached), expected)


def tokens_at(prefixes: PrefixIndex, prefix: PrefixKeys) -> dict[str, int]:
    """Return the tokens that each worker is expected to have of a prompt."""
    return {worker: found.tokens for (worker, _), found in prefixes.cached(prefix).items()}


def test_a_claim_expires_after_its_ttl(prefixes: PrefixIndex, clock: FakeClock) -> None:
    prefixes.record_dispatch(system_prompt(), STUDIO, RULES)
    clock.now_s = START_S + RULES.ttl_s - 1
    assert prefix_holders(prefixes) == {STUDIO}
    clock.now_s = START_S + RULES.ttl_s
    assert prefix_holders(prefixes) == set()


def test_only_the_most_recent_holders_are_remembered(prefixes: PrefixIndex) -> None:
    two_holders = PrefixPolicy(max_workers=2)
    for holding in (STUDIO, LAPTOP, STUDIO, MINI):
        prefixes.record_dispatch(system_prompt(), holding, two_holders)
    assert prefix_holders(prefixes) == {STUDIO, MINI}
    prefixes.record_dispatch(system_prompt(), STUDIO, PrefixPolicy(max_workers=0))
    assert prefix_holders(prefixes) == set()


def test_a_worker_that_has_evicted_a_prompt_takes_the_place_of_no_other(
    prefixes: PrefixIndex, studio: ScriptedWorker
) -> None:
    two_holders = PrefixPolicy(max_workers=2)
    for holding in (LAPTOP, STUDIO):
        prefixes.record_dispatch(system_prompt(), holding, two_holders)
    prefixes.record_report(report_of(studio, evicted=("p",)))
    prefixes.record_dispatch(system_prompt(), MINI, two_holders)
    assert prefix_holders(prefixes) == {LAPTOP, MINI}


def test_the_least_recently_used_ends_are_evicted_beyond_the_limit(
    prefixes: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_affinity, "MAX_ENDS", 256 * 64)
    for number in range(256 * 200):
        prefixes.record_dispatch(system_prompt(str(number)), STUDIO, RULES)
        if number % 1000 == 0:
            prefixes.record_dispatch(system_prompt("often used"), STUDIO, RULES)
    assert 256 * 32 <= len(prefixes) <= 256 * 64
    assert prefix_holders(prefixes, "often used") == {STUDIO}
    assert prefix_holders(prefixes, str(number)) == {STUDIO}
    assert prefix_holders(prefixes, "0") == set()


def test_the_next_turn_goes_to_the_worker_of_the_last_one(prefixes: PrefixIndex) -> None:
    assert turn(prefixes, conversation("c", 1), STUDIO, prompt=900, cached=0) == ""
    turn(prefixes, conversation("other", 1), LAPTOP, prompt=700, cached=0)
    found = prefixes.cached(conversation("c", 2))
    assert {boot: (one.tokens, one.is_system) for boot, one in found.items()} == {
        STUDIO: (900, False),
        LAPTOP: (1000, True),  # of its system prompt, an estimate
    }
    assert turn(prefixes, conversation("c", 2), STUDIO, prompt=1500, cached=930) == ""
    # The worker found 30 tokens more at this end than the prompt had: those of its answer.
    assert tokens_at(prefixes, conversation("c", 1)) == {"studio": 930, "laptop": 1000}
    assert tokens_at(prefixes, conversation("c", 3)) == {"studio": 1500, "laptop": 1000}


def test_a_changed_message_leaves_the_turns_before_it(prefixes: PrefixIndex) -> None:
    for number in range(1, 11):
        turn(prefixes, conversation("c", number), STUDIO, 400 * number, 400 * (number - 1))
    edited = conversation("c", 10, changed_from=7)
    (found,) = prefixes.cached(edited).values()
    assert (found.end.messages, found.tokens) == (6, 1200)
    reason = turn(prefixes, edited, STUDIO, 4000, 1200)
    assert reason == "changed at message 7"
    late = conversation("c", 40, changed_from=60)
    for number in range(11, 41):
        turn(prefixes, conversation("c", number), STUDIO, 400 * number, 400 * (number - 1))
    assert turn(prefixes, late, STUDIO, 16_000, 11_000) == "changed after message 32"


def test_a_new_answer_to_the_same_prompt_is_no_change(prefixes: PrefixIndex) -> None:
    for number, cached in ((1, 0), (2, 390), (2, 790), (2, 790)):
        assert turn(prefixes, conversation("c", number), STUDIO, 400 * number, cached) == ""


def test_a_turn_that_goes_elsewhere_says_so_and_both_workers_have_it_then(
    prefixes: PrefixIndex,
) -> None:
    turn(prefixes, conversation("c", 1), STUDIO, 800, 0)
    second, third = conversation("c", 2), conversation("c", 3)
    expected = prefixes.record_dispatch(second, LAPTOP, RULES)
    assert expected.holders == ((STUDIO, 800),)
    assert prefixes.record_usage(second, LAPTOP, Usage(1600, 5, 0), expected) == OTHER_MAC
    assert tokens_at(prefixes, third) == {"studio": 800, "laptop": 1600}
    expected = prefixes.record_dispatch(third, LAPTOP, RULES)
    assert expected.holders == ()
    assert prefixes.record_usage(third, LAPTOP, Usage(2400, 5, 1600), expected) == ""


def test_a_turn_that_has_moved_has_missed_nothing(prefixes: PrefixIndex) -> None:
    turn(prefixes, conversation("c", 1), STUDIO, 800, 0)
    assert turn(prefixes, conversation("c", 2), LAPTOP, 1600, 800) == ""
    assert tokens_at(prefixes, conversation("c", 3)) == {"studio": 800, "laptop": 1600}


def test_all_that_have_more_are_named_the_most_first(prefixes: PrefixIndex) -> None:
    desk = ("desk", "1")
    turn(prefixes, conversation("c", 1), STUDIO, 800, 0)
    turn(prefixes, conversation("c", 2), LAPTOP, 1600, 0)
    expected = prefixes.record_dispatch(conversation("c", 3), desk, RULES)
    assert expected.holders == ((LAPTOP, 1600), (STUDIO, 800))
    expected = prefixes.record_dispatch(conversation("c", 3), STUDIO, RULES)
    assert [boot for boot, _ in expected.holders] == [desk, LAPTOP]


def test_the_same_system_prompt_in_another_isolation_scope_is_named(prefixes: PrefixIndex) -> None:
    lab, shop = (
        system_prompt("lab"),
        system_prompt("shop")._replace(unscoped=key_of("unscoped lab")),
    )
    assert turn(prefixes, lab, STUDIO, 900, 0) == ""
    assert turn(prefixes, shop, STUDIO, 900, 0) == ISOLATED
    assert turn(prefixes, shop, STUDIO, 900, 880) == ""


def test_fewer_cached_tokens_than_expected_drop_what_the_worker_lacks(
    prefixes: PrefixIndex,
) -> None:
    for number in (1, 2, 3):
        turn(prefixes, conversation("c", number), STUDIO, 2000 * number, 2000 * (number - 1))
    fourth = conversation("c", 4)
    assert turn(prefixes, fourth, STUDIO, 8000, 1000) == EVICTED
    assert prefixes.mispredicted == 1
    (found,) = prefixes.cached(conversation("c", 5)).values()
    assert found.is_system, "the worker keeps the system prompt and no conversation"
    assert turn(prefixes, conversation("c", 5), STUDIO, 10_000, 0) == EVICTED
    assert not prefixes.cached(conversation("c", 6))


def test_an_estimate_is_disproved_only_if_nothing_was_cached(prefixes: PrefixIndex) -> None:
    prompt = system_prompt()
    prefixes.record_dispatch(prompt, STUDIO, RULES)
    assert tokens_at(prefixes, prompt) == {"studio": 1000}
    turn(prefixes, prompt, STUDIO, 300, 90)
    assert tokens_at(prefixes, prompt) == {"studio": 90}
    assert turn(prefixes, prompt, STUDIO, 300, 0) == EVICTED
    assert prefix_holders(prefixes) == set()


def test_a_response_without_usage_drops_only_the_claims_of_its_request(
    prefixes: PrefixIndex,
) -> None:
    turn(prefixes, conversation("c", 1), STUDIO, 800, 0)
    second = conversation("c", 2)
    expected = prefixes.record_dispatch(second, STUDIO, RULES)
    assert expected == ExpectedReuse(tokens=800, kept=2)
    prefixes.record_usage(second, STUDIO, None, expected)
    assert tokens_at(prefixes, second) == {"studio": 800}
    new = conversation("new", 1, system="q")
    prefixes.record_usage(new, STUDIO, None, prefixes.record_dispatch(new, STUDIO, RULES))
    assert not prefixes.cached(new)


def test_a_server_that_counts_no_cached_tokens_disproves_nothing(prefixes: PrefixIndex) -> None:
    unknown = Usage(800, 5, cached_known=False)
    for number in (1, 2, 3):
        prefix = conversation("c", number)
        expected = prefixes.record_dispatch(prefix, STUDIO, RULES)
        assert prefixes.record_usage(prefix, STUDIO, unknown, expected) == ""
    assert set(tokens_at(prefixes, conversation("c", 4))) == {"studio"}


def report_of(worker: ScriptedWorker, *names: str, evicted: tuple[str, ...] = ()) -> WorkerReport:
    """Return a report of a worker that has these system prompts, or has evicted them."""
    return worker.report(
        prefixes=[key_of(name).hex() for name in names],
        prefix_count=len(names),
        evicted_prefixes=[key_of(name).hex() for name in evicted],
    )


@pytest.fixture
def studio() -> ScriptedWorker:
    worker = ScriptedWorker(worker_id="studio", boot_id="1")
    worker.socket.close()
    return worker


def test_reports_add_and_evict_claims_of_their_worker(
    prefixes: PrefixIndex, studio: ScriptedWorker
) -> None:
    prefixes.record_report(report_of(studio, "p", "q"))
    assert prefix_holders(prefixes) == prefix_holders(prefixes, "q") == {STUDIO}
    prefixes.record_dispatch(system_prompt(), LAPTOP, RULES)
    prefixes.record_report(report_of(studio, "q", evicted=("p",)))
    assert prefix_holders(prefixes) == {LAPTOP}, "evicted at that worker only"
    prefixes.record_report(report_of(studio, "r", evicted=("p",)))
    assert prefix_holders(prefixes, "q") == {STUDIO}, "it may be on disk"
    prefixes.record_report(report_of(studio, "p", evicted=()))
    assert prefix_holders(prefixes) == {STUDIO, LAPTOP}


def test_a_turn_after_an_eviction_says_so(prefixes: PrefixIndex, studio: ScriptedWorker) -> None:
    first = conversation("c", 1)
    turn(prefixes, first, STUDIO, 800, 0)
    evicted = (first.ends[0].key.hex(),)
    prefixes.record_report(studio.report(evicted_prefixes=evicted))
    (found,) = prefixes.cached(conversation("c", 2)).values()
    assert found.is_system
    assert turn(prefixes, conversation("c", 2), STUDIO, 1600, 300) == EVICTED


def test_a_report_restores_no_claim_that_a_response_has_disproved(
    prefixes: PrefixIndex, studio: ScriptedWorker
) -> None:
    prefixes.record_report(report_of(studio, "p"))
    turn(prefixes, system_prompt(), STUDIO, 100, 0)
    prefixes.record_report(report_of(studio, "p", "q"))
    assert prefix_holders(prefixes) == set()
    assert prefix_holders(prefixes, "q") == {STUDIO}


def test_keys_of_another_version_are_ignored(prefixes: PrefixIndex, studio: ScriptedWorker) -> None:
    prefixes.record_report(studio.report(prefixes=("a" * 32, "words", "\u00e9" * 16, "aa")))
    prefixes.merge(PrefixClaim((("a" * 32, 1), ("no", 2)), *STUDIO, 900.0), age_s=1.0)
    assert len(prefixes) == 0


def claim_of(name: str, boot: WorkerBoot, ttl_s: float, tokens: int = 0) -> PrefixClaim:
    return PrefixClaim(((key_of(name).hex(), tokens),), *boot, ttl_s)


def test_a_claim_of_another_gateway_expires_at_the_same_time_here(
    prefixes: PrefixIndex, clock: FakeClock
) -> None:
    prefixes.merge(claim_of("p", STUDIO, 900.0, tokens=300), age_s=300.0)
    clock.advance(599.0)
    assert tokens_at(prefixes, system_prompt()) == {"studio": 300}
    clock.advance(1.0)
    assert prefix_holders(prefixes) == set()


def test_a_claim_that_expired_before_its_arrival_is_ignored(prefixes: PrefixIndex) -> None:
    prefixes.merge(claim_of("p", STUDIO, 900.0), age_s=900.0)
    assert len(prefixes) == 0
    prefixes.merge(claim_of("p", STUDIO, 900.0), age_s=899.0)
    assert prefix_holders(prefixes) == {STUDIO}
    prefixes.merge(claim_of("p", STUDIO, 900.0), age_s=901.0)
    assert prefix_holders(prefixes) == {STUDIO}, "it does not end a newer claim of the same worker"


def test_a_withdrawn_claim_of_another_gateway_drops_only_that_boot(
    prefixes: PrefixIndex,
) -> None:
    for boot in (STUDIO, LAPTOP):
        prefixes.merge(claim_of("p", boot, 900.0), age_s=1.0)
    prefixes.merge(claim_of("p", STUDIO, 0.0), age_s=1.0)
    assert prefix_holders(prefixes) == {LAPTOP}


def test_what_a_gateway_publishes_lets_another_one_continue_the_conversation(
    prefixes: PrefixIndex, clock: FakeClock
) -> None:
    other = PrefixIndex(clock)
    for number in range(1, 8):
        turn(prefixes, conversation("c", number), STUDIO, 400 * number, 400 * (number - 1))
    pending = prefixes.take_pending()
    assert all(len(claim.ends) <= 5 for claim in pending)
    for claim in pending:
        other.merge(PrefixClaim(*json.loads(json.dumps(claim))), age_s=0.5)
    eighth = conversation("c", 8)
    assert set(other.cached(eighth)) == set(prefixes.cached(eighth)) == {STUDIO}
    prefixes.record_usage(conversation("c", 7), STUDIO, None, NOTHING_EXPECTED)
    for claim in prefixes.take_pending():
        other.merge(claim, age_s=0.5)
    assert other.cached(eighth)[STUDIO].end.messages == 10, "the last four ends are withdrawn"


def test_a_merged_claim_is_not_published_again(prefixes: PrefixIndex) -> None:
    prefixes.merge(claim_of("p", STUDIO, 900.0), age_s=1.0)
    assert prefixes.take_pending() == ()
    prefixes.record_dispatch(system_prompt(), LAPTOP, RULES)
    assert prefixes.take_pending() == (claim_of("p", LAPTOP, RULES.ttl_s),)
    assert prefixes.take_pending() == ()


def test_after_thousands_of_boots_the_claims_are_forgotten_once(
    prefixes: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_affinity, "_MAX_BOOTS", 3)
    for boot in ("1", "2", "3"):
        prefixes.record_dispatch(system_prompt(boot), ("studio", boot), RULES)
    assert len(prefixes) == 3
    prefixes.record_dispatch(system_prompt("4"), ("studio", "4"), RULES)
    assert len(prefixes) == 1
    assert prefix_holders(prefixes, "4") == {("studio", "4")}


def worker_of(worker_boot: tuple[str, str], in_flight: int = 0) -> WorkerView:
    lane = LaneView.of(lane_report("vlm"), in_flight)
    return WorkerView.of(worker_boot[0], ("demo",), (lane,), boot_id=worker_boot[1])


def first_of(*workers: WorkerView, seed: int = 0) -> str:
    fleet = replace(
        FleetView.of(workers, frozenset(("demo",))), cached=cached_at(STUDIO, tokens=2000)
    )
    return decide(REQUEST, fleet, Random(seed)).candidates[0].worker_id


REQUEST = RoutingRequest(default_policy(), SAMPLED)


def test_a_holder_is_first_until_it_is_much_busier() -> None:
    """With four slots, the holder is first up to two requests, then the other worker."""
    found = [first_of(worker_of(STUDIO, busy), worker_of(LAPTOP)) for busy in range(5)]
    assert found == ["studio"] * 3 + ["laptop"] * 2


def test_a_full_holder_ranks_behind_a_worker_with_a_free_slot() -> None:
    assert first_of(worker_of(STUDIO, 4), worker_of(LAPTOP, 3)) == "laptop"


def test_a_full_holder_costs_as_much_as_another_full_worker() -> None:
    workers = (worker_of(STUDIO, 4), worker_of(LAPTOP, 4))
    fleet = replace(
        FleetView.of(workers, frozenset(("demo",))), cached=cached_at(STUDIO, tokens=2000)
    )
    holder, other = decide(REQUEST, fleet, Random(0)).candidates
    assert holder.score_s == other.score_s


def test_a_restarted_worker_holds_no_prefix() -> None:
    restarted = worker_of(("studio", "2"))
    firsts = {first_of(restarted, worker_of(LAPTOP), seed=seed) for seed in range(50)}
    assert firsts == {"studio", "laptop"}


@given(
    busy=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    holders=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_holders_change_the_order_of_candidates_and_never_the_set(
    busy: list[int], holders: set[int], seed: int
) -> None:
    workers = tuple(worker_of((f"mac-{n}", "1"), count) for n, count in enumerate(busy))
    plain = FleetView.of(workers, frozenset(("demo",)))
    marked = replace(plain, cached=cached_at(*((f"mac-{n}", "1") for n in holders)))
    without, found = (decide(REQUEST, fleet, Random(seed)).candidates for fleet in (plain, marked))
    assert {candidate.worker_id for candidate in without} == {
        candidate.worker_id for candidate in found
    }
    assert {candidate.worker_id for candidate in found if candidate.prefix_cached} <= {
        f"mac-{n}" for n in holders
    }
    least = min(candidate.load for candidate in found)
    assert found[0].load <= least + 0.625
    assert not found[0].prefix_cached or found[0].load < 1 or found[0].load == least
