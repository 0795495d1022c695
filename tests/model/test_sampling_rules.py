"""Rows with sampling rules: which of them draft, and the same answers in either case."""

import itertools

import pytest

from policies.request.profile import Bypass, Sampling
from tests.support.engine_lane import run_until_idle
from workers.engine.draft_length import EXPLORATION_STEPS, SAMPLES, DraftLength
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


def test_a_sampled_row_gives_its_answer_alone_in_any_lane_and_company(make_lane, submit) -> None:
    plain, mtp = make_lane(LaneName.VLM, draft_tokens=0), make_lane()
    alone = submit(plain, "Tell me a story.", sampling=SAMPLED, seed=7)
    run_until_idle(plain)
    beside = submit(mtp, "Tell me a story.", sampling=SAMPLED, seed=7)
    others = [submit(mtp, question) for question in QUESTIONS[:4]]
    run_until_idle(mtp)

    assert alone.row.answer == beside.row.answer
    assert all(isinstance(result.end, Finished) for result in others)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, repetition_penalty=2.0),
        Sampling(temperature=0, frequency_penalty=2.0, presence_penalty=1.0),
        Sampling(temperature=0.8, frequency_penalty=2.0, logit_bias=((30, 3.0),)),
    ],
)
def test_a_row_with_penalties_is_drafted_for_and_answers_as_without(
    make_lane, submit, sampling
) -> None:
    plain, mtp = make_lane(draft_tokens=0), make_lane(draft_tokens=3)
    asked = {"sampling": sampling, "seed": 7, "max_tokens": 48, "draft_tokens": 3}
    alone = [submit(plain, question, **asked) for question in QUESTIONS[:5]]
    free = [submit(plain, question, max_tokens=48) for question in QUESTIONS[:5]]
    run_until_idle(plain)
    beside = [submit(mtp, question, **asked) for question in QUESTIONS[:5]]
    submit(mtp, QUESTIONS[5])
    run_until_idle(mtp)

    assert [result.row.answer for result in beside] == [result.row.answer for result in alone]
    assert sum(result.end.speculation.accepted for result in beside) > 0
    changed = sum(a.row.answer != b.row.answer for a, b in zip(alone, free, strict=True))
    assert changed >= 2, "the penalties decide something"


def test_log_probabilities_of_accepted_drafts_are_those_of_plain_decoding(
    make_lane, submit
) -> None:
    plain, mtp = make_lane(draft_tokens=0), make_lane(draft_tokens=3)
    told = [
        submit(lane, "Count from 1 to 20.", top_logprobs=3, draft_tokens=3, max_tokens=30)
        for lane in (plain, mtp)
    ]
    run_until_idle(plain)
    run_until_idle(mtp)
    alone, drafted = told

    assert drafted.end.speculation.accepted > 0
    assert len(drafted.logprobs) == len(drafted.row.answer) == 30
    for mine, expected in zip(drafted.logprobs, alone.logprobs, strict=True):
        assert mine.token_id == expected.token_id
        assert mine.logprob == pytest.approx(expected.logprob, abs=1e-3)
        for ours, theirs in zip(mine.top, expected.top, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_no_log_probability_is_sent_for_drafts_after_the_end(make_lane, submit) -> None:
    lane = make_lane(draft_tokens=4)
    asked = {"top_logprobs": 0, "draft_tokens": 4, "max_tokens": 60}
    results = [submit(lane, "Count from 1 to 20.", stop=(f"{n},",), **asked) for n in range(3, 9)]
    run_until_idle(lane)

    assert sum(result.end.speculation.accepted for result in results) > 0
    assert [len(result.logprobs) for result in results] == [
        len(result.row.answer) for result in results
    ]


def test_reasons_that_the_text_lane_can_draft_for_are_no_bypass(make_lane) -> None:
    text, pictures = make_lane(), make_lane(LaneName.VLM)
    asked = Generation(
        request_id="test",
        lane=LaneName.TEXT_MTP,
        prompt=Prompt(text=""),
        sampling=SAMPLED,
        bypass=(Bypass.NON_GREEDY_SAMPLING, Bypass.LOGPROBS, Bypass.LOGITS_PROCESSORS),
    )
    assert text.bypass_reasons(asked) == ()
    assert pictures.bypass_reasons(asked) == asked.bypass


def test_a_bypassed_row_speculates_nothing_and_is_counted_by_its_reason(make_lane, submit) -> None:
    lane = make_lane()
    biased = submit(
        lane,
        "Hello",
        sampling=Sampling(temperature=0, logit_bias=((30, 1.0),)),
        bypass=(Bypass.LOGITS_PROCESSORS,),
    )
    beside = submit(lane, "Count from 1 to 20.")
    run_until_idle(lane)

    assert biased.end.speculation.steps == 0
    assert beside.end.speculation.steps > 0
    assert lane.counters.report().bypass_counts == {"logits_processors": 1}


def test_requests_never_drafted_for_as_it_does_not_pay_are_counted(make_lane, submit) -> None:
    lane = make_lane(clock=itertools.count().__next__)  # every step takes one second
    measured = lane._decoder._draft_length
    for k, cost_s in ((0, 1.0), (1, 9.0), (2, 9.0)):
        for _ in range(SAMPLES):
            measured.observe_cost(3, k, cost_s)
    # The first two draft while the batch is small; with the third, drafting does not pay.
    results = [
        submit(lane, "Count from 1 to 20.", adaptive=True, max_tokens=limit)
        for limit in (60, 60, 12)
    ]
    run_until_idle(lane)
    report = lane.counters.report()

    assert [result.end.speculation.steps > 0 for result in results] == [True, True, False]
    assert report.bypass_counts == {"mtp_not_paying": 1}
    assert report.draft_tokens_by_rows[2] == 0 < report.draft_tokens_by_rows[0]
    assert (report.drafting_pays(1), report.drafting_pays(3)) == (True, False)
    assert report.effective_draft_tokens == report.draft_tokens_by_rows[0], "idle: of one row"


def test_a_request_that_names_its_k_is_drafted_for_where_it_does_not_pay(make_lane, submit) -> None:
    lane = make_lane(clock=itertools.count().__next__)
    for k, cost_s in ((0, 1.0), (1, 9.0), (2, 9.0)):
        for _ in range(SAMPLES):
            lane._decoder._draft_length.observe_cost(3, k, cost_s)
    results = [submit(lane, "Count from 1 to 20.", adaptive=number < 2) for number in range(3)]
    run_until_idle(lane)

    assert results[2].end.speculation.steps > 0
    assert lane.counters.report().bypass_counts == {}


class RecordingDraftLength(DraftLength):
    """Records the draft lengths of the steps whose cost it observes."""

    def __init__(self) -> None:
        super().__init__(2)
        self.observed: list[int] = []

    def observe_cost(self, rows: int, k: int, duration_s: float) -> None:
        self.observed.append(k)


class ScriptedDraftLength(RecordingDraftLength):
    """Chooses by a plan, then plain steps."""

    def __init__(self, *plan: int) -> None:
        super().__init__()
        self._plan = iter(plan)

    def choose(self, rows: int, fewest_steps: int = 0) -> int:
        return next(self._plan, 0)

    def is_exploring(self, rows: int, fewest_steps: int) -> bool:
        return False


def drafted_by(policy: RecordingDraftLength, lane, ask) -> list[int]:
    """Return the draft lengths of the steps of one answer under a policy."""
    lane._decoder._draft_length = policy
    results = ask(lane, "Count from 1 to 20.", adaptive=True, max_tokens=40)
    run_until_idle(lane)
    return [step.drafted for step in results.end.steps]


def test_the_cost_of_a_step_that_reads_the_backlog_is_not_observed(make_lane, submit) -> None:
    policy = ScriptedDraftLength(0, 0, 0, 2, 2, 0, 1)

    assert drafted_by(policy, make_lane(), submit) == [2, 2, 1]
    assert policy.observed[:5] == [0, 0, 0, 2, 0]
    assert 1 not in policy.observed


def test_the_cost_of_the_first_steps_of_an_answer_is_not_observed(make_lane, submit) -> None:
    policy = RecordingDraftLength()
    whole = drafted_by(policy, make_lane(), submit).count(2)

    assert whole > EXPLORATION_STEPS
    assert policy.observed == [2] * (whole - EXPLORATION_STEPS)
