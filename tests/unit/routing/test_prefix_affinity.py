"""Which workers have cached which prompts: when claims expire or are disproved, and how they affect
routing.
"""

import json
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
from gateway.routing.view import WorkerView
from gateway.types import Usage, WorkerBoot
from paceline.protocol import WorkerReport
from policies.document import default_policy
from policies.sections import PrefixPolicy
from tests.support.fake_clock import START_S, FakeClock
from tests.support.fleet_views import fleet_view, view_of
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
from tests.support.scheduler_harness import worker_report
from tests.support.scripted_worker import lane_report

MINI = ("mini", "1")


class Index(PrefixIndex):
    """An index under the clock of a test."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        super().__init__(self.clock)

    def turn(self, prefix: PrefixKeys, boot: WorkerBoot, prompt: int, cached: int) -> str:
        """Send one request and receive its usage; return why earlier turns were read again."""
        expected = self.record_dispatch(prefix, boot, RULES)
        return self.record_usage(prefix, boot, Usage(prompt, 5, cached), expected)

    def tokens_at(self, prefix: PrefixKeys) -> dict[str, int]:
        """Return the tokens that each worker is expected to have of a prompt."""
        return {worker: found.tokens for (worker, _), found in self.cached(prefix).items()}

    def holders(self, name: str = "p") -> set[WorkerBoot]:
        return prefix_holders(self, name)


@pytest.fixture
def index() -> Index:
    return Index()


def test_a_claim_expires_after_its_ttl(index: Index) -> None:
    index.record_dispatch(system_prompt(), STUDIO, RULES)
    index.clock.now_s = START_S + RULES.ttl_s - 1
    assert index.holders() == {STUDIO}
    index.clock.now_s = START_S + RULES.ttl_s
    assert index.holders() == set()


def test_only_the_most_recent_holders_are_remembered(index: Index) -> None:
    two_holders = PrefixPolicy(max_workers=2)
    for holding in (STUDIO, LAPTOP, STUDIO, MINI):
        index.record_dispatch(system_prompt(), holding, two_holders)
    assert index.holders() == {STUDIO, MINI}
    index.record_report(report_of(evicted=("p",)))
    index.record_dispatch(system_prompt(), LAPTOP, two_holders)
    assert index.holders() == {LAPTOP, MINI}, "an evicted prompt takes the place of no other"
    index.record_dispatch(system_prompt(), STUDIO, PrefixPolicy(max_workers=0))
    assert index.holders() == set()


def test_the_least_recently_used_ends_are_evicted_beyond_the_limit(index, monkeypatch) -> None:
    monkeypatch.setattr(prefix_affinity, "MAX_ENDS", 256 * 64)
    for number in range(256 * 200):
        index.record_dispatch(system_prompt(str(number)), STUDIO, RULES)
        if number % 1000 == 0:
            index.record_dispatch(system_prompt("often used"), STUDIO, RULES)
    assert 256 * 32 <= len(index) <= 256 * 64
    assert index.holders("often used") == {STUDIO}
    assert index.holders(str(number)) == {STUDIO}
    assert index.holders("0") == set()


def test_the_next_turn_goes_to_the_worker_of_the_last_one(index: Index) -> None:
    assert index.turn(conversation("c", 1), STUDIO, prompt=900, cached=0) == ""
    index.turn(conversation("other", 1), LAPTOP, prompt=700, cached=0)
    found = index.cached(conversation("c", 2))
    assert {boot: (one.tokens, one.is_system) for boot, one in found.items()} == {
        STUDIO: (900, False),
        LAPTOP: (1000, True),  # of its system prompt, an estimate
    }
    assert index.turn(conversation("c", 2), STUDIO, prompt=1500, cached=930) == ""
    # The worker found 30 tokens more at this end than the prompt had: those of its answer.
    assert index.tokens_at(conversation("c", 1)) == {"studio": 930, "laptop": 1000}
    assert index.tokens_at(conversation("c", 3)) == {"studio": 1500, "laptop": 1000}
    again = index.turn(conversation("c", 2), STUDIO, prompt=1500, cached=1490)
    assert again == "", "a new answer to the same prompt is no change"


def test_a_changed_message_leaves_the_turns_before_it(index: Index) -> None:
    for number in range(1, 11):
        index.turn(conversation("c", number), STUDIO, 400 * number, 400 * (number - 1))
    edited = conversation("c", 10, changed_from=7)
    (found,) = index.cached(edited).values()
    assert (found.end.messages, found.tokens) == (6, 1200)
    reason = index.turn(edited, STUDIO, 4000, 1200)
    assert reason == "changed at message 7"
    late = conversation("c", 40, changed_from=60)
    for number in range(11, 41):
        index.turn(conversation("c", number), STUDIO, 400 * number, 400 * (number - 1))
    assert index.turn(late, STUDIO, 16_000, 11_000) == "changed after message 32"


def test_a_turn_that_goes_elsewhere_says_so_and_both_workers_have_it_then(index: Index) -> None:
    index.turn(conversation("c", 1), STUDIO, 800, 0)
    second, third = conversation("c", 2), conversation("c", 3)
    expected = index.record_dispatch(second, LAPTOP, RULES)
    assert expected.holders == ((STUDIO, 800),)
    for cached, reason in ((0, OTHER_MAC), (800, "")):  # the second has moved, and missed nothing
        assert index.record_usage(second, LAPTOP, Usage(1600, 5, cached), expected) == reason
        assert index.tokens_at(third) == {"studio": 800, "laptop": 1600}
    expected = index.record_dispatch(third, LAPTOP, RULES)
    assert expected.holders == ()
    assert index.record_usage(third, LAPTOP, Usage(2400, 5, 1600), expected) == ""


def test_all_that_have_more_are_named_the_most_first(index: Index) -> None:
    desk = ("desk", "1")
    index.turn(conversation("c", 1), STUDIO, 800, 0)
    index.turn(conversation("c", 2), LAPTOP, 1600, 0)
    expected = index.record_dispatch(conversation("c", 3), desk, RULES)
    assert expected.holders == ((LAPTOP, 1600), (STUDIO, 800))
    expected = index.record_dispatch(conversation("c", 3), STUDIO, RULES)
    assert [boot for boot, _ in expected.holders] == [desk, LAPTOP]


def test_the_same_system_prompt_in_another_isolation_scope_is_named(index: Index) -> None:
    lab = system_prompt("lab")
    shop = system_prompt("shop")._replace(unscoped=lab.unscoped)
    assert index.turn(lab, STUDIO, 900, 0) == ""
    assert index.turn(shop, STUDIO, 900, 0) == ISOLATED
    assert index.turn(shop, STUDIO, 900, 880) == ""


def test_fewer_cached_tokens_than_expected_drop_what_the_worker_lacks(index: Index) -> None:
    for number in (1, 2, 3):
        index.turn(conversation("c", number), STUDIO, 2000 * number, 2000 * (number - 1))
    fourth = conversation("c", 4)
    assert index.turn(fourth, STUDIO, 8000, 1000) == EVICTED
    (found,) = index.cached(conversation("c", 5)).values()
    assert found.is_system, "the worker keeps the system prompt and no conversation"
    assert index.turn(conversation("c", 5), STUDIO, 10_000, 0) == EVICTED
    assert not index.cached(conversation("c", 6))


def test_an_estimate_is_disproved_only_if_nothing_was_cached(index: Index) -> None:
    prompt = system_prompt()
    index.record_dispatch(prompt, STUDIO, RULES)
    assert index.tokens_at(prompt) == {"studio": 1000}
    index.turn(prompt, STUDIO, 300, 90)
    assert index.tokens_at(prompt) == {"studio": 90}
    index.record_report(report_of("p"))
    assert index.turn(prompt, STUDIO, 300, 0) == EVICTED
    assert index.holders() == set()
    index.record_report(report_of("p", "q"))
    assert index.holders() == set(), "a report restores no claim that a response has disproved"
    assert index.holders("q") == {STUDIO}


def test_a_response_without_usage_drops_only_the_claims_of_its_request(index: Index) -> None:
    index.turn(conversation("c", 1), STUDIO, 800, 0)
    second = conversation("c", 2)
    expected = index.record_dispatch(second, STUDIO, RULES)
    assert expected == ExpectedReuse(tokens=800, kept=2)
    index.record_usage(second, STUDIO, None, expected)
    assert index.tokens_at(second) == {"studio": 800}
    new = conversation("new", 1, system="q")
    index.record_usage(new, STUDIO, None, index.record_dispatch(new, STUDIO, RULES))
    assert not index.cached(new)


def test_a_server_that_counts_no_cached_tokens_disproves_nothing(index: Index) -> None:
    for number in (1, 2, 3):
        prefix = conversation("c", number)
        expected = index.record_dispatch(prefix, STUDIO, RULES)
        unknown = Usage(800, 5, cached_known=False)
        assert index.record_usage(prefix, STUDIO, unknown, expected) == ""
    assert set(index.tokens_at(conversation("c", 4))) == {"studio"}


def report_of(*names: str, evicted: tuple[str, ...] = ()) -> WorkerReport:
    """Return a report of `STUDIO` that has these system prompts, or has evicted them."""
    return worker_report(
        "studio",
        prefixes=[key_of(name).hex() for name in names],
        prefix_count=len(names),
        evicted_prefixes=[key_of(name).hex() for name in evicted],
    )


def test_reports_add_and_evict_claims_of_their_worker(index: Index) -> None:
    index.record_report(report_of("p", "q"))
    assert index.holders() == index.holders("q") == {STUDIO}
    index.record_dispatch(system_prompt(), LAPTOP, RULES)
    index.record_report(report_of("q", evicted=("p",)))
    assert index.holders() == {LAPTOP}, "evicted at that worker only"
    index.record_report(report_of("r", evicted=("p",)))
    assert index.holders("q") == {STUDIO}, "it may be on disk"
    index.record_report(report_of("p", evicted=()))
    assert index.holders() == {STUDIO, LAPTOP}


def test_a_claim_lasts_as_long_as_reports_confirm_it(index: Index) -> None:
    """A worker keeps a conversation for a week, of which most keys come by turns."""
    report = report_of("p").model_copy(update={"held_prefixes": (key_of("q").hex(),)})
    for _ in range(10):
        index.record_report(report)
        index.clock.advance(RULES.ttl_s * 0.4)
        assert index.holders() == index.holders("q") == {STUDIO}
    index.record_report(report_of("p"))
    index.clock.advance(RULES.ttl_s * 0.7)
    assert (index.holders(), index.holders("q")) == ({STUDIO}, set())


def test_no_report_renews_a_claim_that_a_response_has_disproved(index: Index) -> None:
    first = conversation("c", 1)
    keys = tuple(end.key.hex() for end in first.ends)
    index.turn(first, STUDIO, 800, 0)
    report = worker_report("studio", prefixes=keys[:1], held_prefixes=keys[1:])
    index.record_report(report)
    assert index.turn(conversation("c", 2), STUDIO, 1600, 0) == EVICTED
    index.record_report(report)
    assert not index.cached(conversation("c", 3))
    index.record_dispatch(first, STUDIO, RULES)
    assert set(index.cached(first)) == {STUDIO}, "it reads them again"


def test_confirmations_leave_the_claims_of_as_many_workers_as_the_policy_allows(index) -> None:
    for number in range(RULES.max_workers):
        index.record_dispatch(system_prompt(), (f"mac-{number}", "1"), RULES)
    before = index.holders()
    index.record_report(worker_report("studio", held_prefixes=(key_of("p").hex(),)))
    assert index.holders() == before


def test_a_turn_after_an_eviction_says_so(index: Index) -> None:
    first = conversation("c", 1)
    index.turn(first, STUDIO, 800, 0)
    evicted = (first.ends[0].key.hex(),)
    index.record_report(worker_report("studio", evicted_prefixes=evicted))
    (found,) = index.cached(conversation("c", 2)).values()
    assert found.is_system
    assert index.turn(conversation("c", 2), STUDIO, 1600, 300) == EVICTED


def test_keys_of_another_version_are_ignored(index: Index) -> None:
    index.record_report(worker_report("studio", prefixes=("a" * 32, "words", "\u00e9" * 16, "aa")))
    index.merge(PrefixClaim((("a" * 32, 1), ("no", 2)), *STUDIO, 900.0), age_s=1.0)
    assert len(index) == 0


def claim_of(boot: WorkerBoot, ttl_s: float = 900.0, tokens: int = 0) -> PrefixClaim:
    return PrefixClaim(((key_of("p").hex(), tokens),), *boot, ttl_s)


def test_a_claim_of_another_gateway_expires_at_the_same_time_here(index: Index) -> None:
    index.merge(claim_of(STUDIO), age_s=900.0)
    assert len(index) == 0, "it expired before its arrival"
    index.merge(claim_of(STUDIO, tokens=300), age_s=300.0)
    index.clock.advance(599.0)
    assert index.tokens_at(system_prompt()) == {"studio": 300}
    index.merge(claim_of(STUDIO), age_s=901.0)
    assert index.holders() == {STUDIO}, "it does not end a newer claim of the same worker"
    index.clock.advance(1.0)
    assert index.holders() == set()


def test_a_withdrawn_claim_of_another_gateway_drops_only_that_boot(index: Index) -> None:
    for boot in (STUDIO, LAPTOP):
        index.merge(claim_of(boot), age_s=1.0)
    index.merge(claim_of(STUDIO, ttl_s=0.0), age_s=1.0)
    assert index.holders() == {LAPTOP}


def test_what_a_gateway_publishes_lets_another_one_continue_the_conversation(index: Index) -> None:
    other = Index(index.clock)
    for number in range(1, 8):
        index.turn(conversation("c", number), STUDIO, 400 * number, 400 * (number - 1))
    pending = index.take_pending()
    assert all(len(claim.ends) <= 5 for claim in pending)
    for claim in pending:
        other.merge(PrefixClaim(*json.loads(json.dumps(claim))), age_s=0.5)
    eighth = conversation("c", 8)
    assert set(other.cached(eighth)) == set(index.cached(eighth)) == {STUDIO}
    index.record_usage(conversation("c", 7), STUDIO, None, NOTHING_EXPECTED)
    for claim in index.take_pending():
        other.merge(claim, age_s=0.5)
    assert other.cached(eighth)[STUDIO].end.messages == 10, "the last four ends are withdrawn"


def test_a_merged_claim_is_not_published_again(index: Index) -> None:
    index.merge(claim_of(STUDIO), age_s=1.0)
    assert index.take_pending() == ()
    index.record_dispatch(system_prompt(), LAPTOP, RULES)
    assert index.take_pending() == (claim_of(LAPTOP, RULES.ttl_s),)
    assert index.take_pending() == ()


def test_after_thousands_of_boots_the_claims_are_forgotten_once(index, monkeypatch) -> None:
    monkeypatch.setattr(prefix_affinity, "_MAX_BOOTS", 3)
    for boot in ("1", "2", "3"):
        index.record_dispatch(system_prompt(boot), ("studio", boot), RULES)
    assert len(index) == 3
    index.record_dispatch(system_prompt("4"), ("studio", "4"), RULES)
    assert len(index) == 1
    assert index.holders("4") == {("studio", "4")}


def worker_of(worker_boot: WorkerBoot, in_flight: int = 0) -> WorkerView:
    return view_of(worker_boot[0], lane_report("vlm"), busy=in_flight, boot_id=worker_boot[1])


def test_a_restarted_worker_holds_no_prefix() -> None:
    fleet = fleet_view(worker_of(("studio", "2")), worker_of(LAPTOP))
    cached = cached_at(STUDIO, tokens=2000)
    decisions = [decide(REQUEST, fleet, 0.0, Random(seed), cached) for seed in range(50)]
    assert {one.candidates[0].worker_id for one in decisions} == {"studio", "laptop"}


REQUEST = RoutingRequest(default_policy(), SAMPLED)


@given(
    busy=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    holders=st.sets(st.integers(0, 5)),
    seed=st.integers(0, 99),
)
def test_holders_change_the_order_of_candidates_and_never_the_set(busy, holders, seed) -> None:
    fleet = fleet_view(*(worker_of((f"mac-{n}", "1"), count) for n, count in enumerate(busy)))
    claims = cached_at(*((f"mac-{n}", "1") for n in holders))
    without, found = (
        decide(REQUEST, fleet, 0.0, Random(seed), known).candidates for known in ({}, claims)
    )
    assert {one.worker_id for one in without} == {one.worker_id for one in found}
    cached = {one.worker_id for one in found if one.prefix_cached}
    assert cached <= {f"mac-{n}" for n in holders}
    least = min(candidate.load for candidate in found)
    assert found[0].load <= least + 0.625
    assert not found[0].prefix_cached or found[0].load < 1 or found[0].load == least
