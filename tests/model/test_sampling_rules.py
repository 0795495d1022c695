"""Rows with sampling rules: which of them draft, and that answers are equal in both cases."""

import itertools
from collections.abc import Sequence

import pytest

from paceline.request.profile import Bypass, Sampling
from tests.support.engine_lane import run_until_idle
from workers.engine.decode.draft_length import EXPLORATION_STEPS, SAMPLES, Accepted, DraftLength
from workers.engine.types import Finished, Generation, LaneName, Prompt

QUESTIONS = [
    "Hello",
    "What is 2 + 2?",
    "Count from 1 to 20.",
    "Tell me a story about a fox.",
    "Who are you?",
    "Name three fruits.",
]
SAMPLED = Sampling(temperature=0.8, top_p=0.95)


def test_a_sampled_row_gets_the_same_answer_in_any_lane_and_batch(make_lane, submit, ask) -> None:
    plain, mtp = make_lane(LaneName.VLM, draft_tokens=0), make_lane()
    single = ask(plain, "Tell me a story.", sampling=SAMPLED, seed=7)
    batched = submit(mtp, "Tell me a story.", sampling=SAMPLED, seed=7)
    others = [submit(mtp, question) for question in QUESTIONS[:4]]
    run_until_idle(mtp)

    assert single.row.answer == batched.row.answer
    assert all(isinstance(result.end, Finished) for result in others)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=2.0),
        Sampling(temperature=0, frequency_penalty=2.0, presence_penalty=1.0),
        Sampling(temperature=0.8, frequency_penalty=2.0, logit_bias=((30, 3.0),)),
    ],
)
def test_a_row_with_penalties_drafts_and_gets_the_answer_of_plain_decoding(
    make_lane, submit, ask, sampling
) -> None:
    plain, mtp = make_lane(draft_tokens=0), make_lane(draft_tokens=3)
    options = {"sampling": sampling, "seed": 7, "max_tokens": 48, "draft_tokens": 3}
    plain_results = [submit(plain, question, **options) for question in QUESTIONS[:5]]
    unpenalised = [submit(plain, question, max_tokens=48) for question in QUESTIONS[:5]]
    run_until_idle(plain)
    drafted_results = [submit(mtp, question, **options) for question in QUESTIONS[:5]]
    ask(mtp, QUESTIONS[5])

    assert [result.row.answer for result in drafted_results] == [
        result.row.answer for result in plain_results
    ]
    assert sum(result.end.speculation.accepted for result in drafted_results) > 0
    changed = sum(
        a.row.answer != b.row.answer for a, b in zip(plain_results, unpenalised, strict=True)
    )
    assert changed >= 2, "the penalties change some answers"


def test_log_probabilities_of_accepted_drafts_equal_those_of_plain_decoding(
    make_lane, submit
) -> None:
    plain, mtp = make_lane(draft_tokens=0), make_lane(draft_tokens=3)
    results = [
        submit(lane, "Count from 1 to 20.", top_logprobs=3, draft_tokens=3, max_tokens=30)
        for lane in (plain, mtp)
    ]
    run_until_idle(plain, mtp)
    expected_result, drafted = results

    assert drafted.end.speculation.accepted > 0
    assert len(drafted.logprobs) == len(drafted.row.answer) == 30
    for actual, expected in zip(drafted.logprobs, expected_result.logprobs, strict=True):
        assert actual.token_id == expected.token_id
        assert actual.logprob == pytest.approx(expected.logprob, abs=1e-3)
        for actual_top, expected_top in zip(actual.top, expected.top, strict=True):
            assert actual_top.logprob == pytest.approx(expected_top.logprob, abs=1e-3)


def test_no_log_probability_is_sent_for_drafts_after_the_end(make_lane, submit) -> None:
    lane = make_lane(draft_tokens=4)
    options = {"top_logprobs": 0, "draft_tokens": 4, "max_tokens": 60}
    results = [submit(lane, "Count from 1 to 20.", stop=(f"{n},",), **options) for n in range(3, 9)]
    run_until_idle(lane)

    assert sum(result.end.speculation.accepted for result in results) > 0
    assert [len(result.logprobs) for result in results] == [
        len(result.row.answer) for result in results
    ]


def test_reasons_that_do_not_prevent_drafts_are_no_bypass(make_lane) -> None:
    text, pictures = make_lane(), make_lane(LaneName.VLM)
    generation = Generation(
        request_id="test",
        lane=LaneName.TEXT_MTP,
        prompt=Prompt(text=""),
        sampling=SAMPLED,
        bypass=(Bypass.NON_GREEDY_SAMPLING, Bypass.LOGPROBS, Bypass.LOGITS_PROCESSORS),
    )
    assert text.bypass_reasons(generation) == pictures.bypass_reasons(generation) == ()
    undrafted = make_lane(head=None, draft_tokens=0)
    assert undrafted.bypass_reasons(generation) == generation.bypass


def test_a_bypassed_row_does_not_speculate_and_counts_under_its_reason(
    make_lane, submit, ask
) -> None:
    lane = make_lane()
    biased = submit(
        lane,
        "Hello",
        sampling=Sampling(temperature=0, logit_bias=((30, 1.0),)),
        bypass=(Bypass.LOGITS_PROCESSORS,),
    )
    drafted = ask(lane, "Count from 1 to 20.")

    assert biased.end.speculation.steps == 0
    assert drafted.end.speculation.steps > 0
    assert lane.counters.report().bypass_counts == {"logits_processors": 1}


def test_requests_without_drafts_because_they_do_not_pay_are_counted(make_lane, submit) -> None:
    """A request that names its draft length drafts all the same, and does not count."""
    lane = make_lane(clock=itertools.count().__next__)  # every step takes one second
    measured = lane._decoder._draft_length
    for k, cost_s in ((0, 1.0), (1, 9.0), (2, 9.0)):
        for _ in range(SAMPLES):
            measured.observe_cost(3, k, cost_s)
    # The first two draft while the batch is small; with the third, drafting does not pay.
    results = [
        submit(lane, "Count from 1 to 20.", adaptive=adaptive, max_tokens=limit)
        for adaptive, limit in ((True, 60), (True, 60), (True, 12), (False, 12))
    ]
    run_until_idle(lane)
    report = lane.counters.report()

    assert [result.end.speculation.steps > 0 for result in results] == [True, True, False, True]
    assert report.bypass_counts == {"mtp_not_paying": 1}
    assert report.draft_tokens_by_rows[2] == 0 < report.draft_tokens_by_rows[0]
    assert (report.drafting_pays(1), report.drafting_pays(3)) == (True, False)
    assert report.effective_draft_tokens == report.draft_tokens_by_rows[0], (
        "an idle lane reports the length for one row"
    )


class RecordingDraftLength(DraftLength):
    """A policy that records the draft lengths of the steps whose cost it observes."""

    def __init__(self) -> None:
        super().__init__(2)
        self.observed: list[int] = []

    def observe_cost(
        self, rows: int, k: int, duration_s: float, *, head_tokens: int | None = None
    ) -> None:
        self.observed.append(k)


class ScriptedDraftLength(RecordingDraftLength):
    """A policy that follows a plan and then chooses plain steps."""

    def __init__(self, *plan: int) -> None:
        super().__init__()
        self._plan = iter(plan)

    def choose(self, rows: Sequence[Accepted], fewest_steps: int = 0) -> int:
        return next(self._plan, 0)

    def is_exploring(self, rows: int, fewest_steps: int) -> bool:
        return False


def draft_lengths(policy: RecordingDraftLength, lane, ask) -> list[int]:
    """Return the draft lengths of the steps of one answer under a policy."""
    lane._decoder._draft_length = policy
    results = ask(lane, "Count from 1 to 20.", adaptive=True, max_tokens=40)
    return [step.drafted for step in results.end.steps]


def test_the_cost_of_a_step_that_reads_the_backlog_is_not_observed(make_lane, ask) -> None:
    policy = ScriptedDraftLength(0, 0, 0, 2, 2, 0, 1)

    assert draft_lengths(policy, make_lane(), ask) == [2, 2, 1]
    # The first step also takes a part of the second one, which begins before the first is read.
    assert policy.observed[:4] == [0, 0, 2, 0]
    assert 1 not in policy.observed


def test_the_cost_of_the_first_steps_of_an_answer_is_not_observed(make_lane, ask) -> None:
    policy = RecordingDraftLength()
    full_drafts = draft_lengths(policy, make_lane(), ask).count(2)

    assert full_drafts > EXPLORATION_STEPS
    # One more is chosen before the fourth is read, and no step begins ahead of the last but one.
    assert policy.observed == [2] * (full_drafts - EXPLORATION_STEPS - 2)
