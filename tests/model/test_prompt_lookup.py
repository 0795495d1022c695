"""Prompt lookup in the engine: other drafts, the same answers, for families with and without heads.

The clock of these lanes counts its calls, so that every step costs the same and drafts always pay.
"""

import itertools
from dataclasses import replace

import pytest

from paceline.protocol import DraftSource
from paceline.request.profile import Bypass, Sampling
from tests.support import model_families as families
from tests.support.engine_lane import run_until_idle
from tests.support.failing_model import FailingPart
from tests.support.reference_decoder import assert_matches_reference
from workers.demo import CHECKPOINT
from workers.engine import engine as assembly
from workers.engine.decode.draft_head import MAX_CONSECUTIVE_ERRORS
from workers.engine.decode.draft_length import RUN_LENGTHS
from workers.engine.prefix.cache import PrefixCache
from workers.engine.types import EngineSettings, Finished, LaneName, Prompt

QUESTIONS = ("Count from 1 to 20.", "Tell me a story about a fox.", "Hello")
REPEATED = [40, 41, 42, 43, 44, 45, 46, 47] * 12
SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 20


def constant_clock():
    return itertools.count().__next__


@pytest.fixture
def headless_lane(make_lane, checkpoint):
    """Make a lane of a random family without heads, or of the demo model without its own."""

    def make(target=None, **parts):
        target = target or checkpoint.target
        eos = checkpoint.eos if target is checkpoint.target else frozenset()
        return make_lane(target=target, head=None, eos=eos, clock=constant_clock(), **parts)

    return make


@pytest.mark.parametrize(
    "family", [families.tiny_llama, families.tiny_qwen2_5_vl, families.tiny_llama_sliding_window]
)
def test_a_random_model_without_heads_accepts_looked_up_drafts_and_answers_as_without(
    headless_lane, submit, checkpoint, family
) -> None:
    target = family(checkpoint.vocabulary)
    lengths = (REPEATED, REPEATED[3:70], list(range(50, 90)), [7, 8, 9])
    plain_lane, lane = headless_lane(target, draft_tokens=0), headless_lane(target)
    assert (lane.looks_up, lane.has_head, plain_lane.looks_up) == (True, False, False)
    plain = [submit(plain_lane, prompt, max_tokens=60, draft_tokens=0) for prompt in lengths]
    drafted = [
        submit(lane, prompt, max_tokens=60, adaptive=True, looks_up=True) for prompt in lengths
    ]
    run_until_idle(plain_lane, lane)

    for one, other in zip(drafted, plain, strict=True):
        assert one.row.answer == other.row.answer
    total = lane.counters.report().speculation
    assert total.accepted_by_source[DraftSource.LOOKUP] == total.accepted > 20
    assert total.drafted_by_source == {"lookup": total.drafted}
    longest = RUN_LENGTHS[0] if target.is_recurrent else RUN_LENGTHS[-1]
    assert max(step.drafted for one in drafted for step in one.row.speculation.steps) == longest


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.9, top_p=0.9),
        Sampling(temperature=0.7, top_k=20, presence_penalty=0.3),
        Sampling(temperature=0, repetition_penalty=1.1),
    ],
)
def test_sampled_rows_and_logprobs_are_the_same_with_looked_up_drafts(
    headless_lane, submit, sampling
) -> None:
    """A row accepts the draft token that it would have drawn."""
    answers = []
    for looks_up in (False, True):
        lane = headless_lane()
        for count, length in itertools.product((1, 2, 3), (0, 2)):  # so that any run is drafted
            lane._decoder._draft_length.observe_cost(count, length, 0.0, head_tokens=0)
        rows = [
            submit(
                lane,
                question,
                system=SYSTEM,
                seed=seed,
                sampling=sampling,
                looks_up=looks_up,
                adaptive=True,
                top_logprobs=2,
            )
            for seed, question in enumerate(QUESTIONS)
        ]
        run_until_idle(lane)
        answers.append(
            [
                (one.row.answer, one.text, [round(each.logprob, 3) for each in one.logprobs])
                for one in rows
            ]
        )
        assert (lane.counters.report().speculation.drafted > 0) == looks_up
    assert answers[0] == answers[1]


def test_head_and_lookup_draft_in_one_batch(checkpoint, make_lane, submit) -> None:
    lane = make_lane(clock=constant_clock())
    prompts = (REPEATED, REPEATED[5:60], *QUESTIONS)
    rows = [
        submit(lane, prompt, looks_up=looks_up, max_tokens=80)
        for prompt in prompts
        for looks_up in (True, False)
    ]
    run_until_idle(lane)

    assert_matches_reference(checkpoint, *rows)
    total = lane.counters.report().speculation
    assert min(total.accepted_by_source[source] for source in ("head", "lookup")) > 0
    assert sum(total.accepted_by_source.values()) == total.accepted
    only_head = [row for row in rows if not row.row.looks_up]
    assert all(set(row.row.speculation.drafted) <= {"head"} for row in only_head)


def test_a_row_that_names_its_draft_length_looks_up_no_more(headless_lane, ask) -> None:
    lane = headless_lane(families.tiny_llama(1000))
    result = ask(lane, REPEATED, max_tokens=40, draft_tokens=3, looks_up=True)

    assert {step.drafted for step in result.row.speculation.steps} <= {1, 2, 3}
    assert result.end.speculation.accepted > 0


def test_a_sick_head_closes_the_head_and_not_the_lane(checkpoint, make_lane, submit) -> None:
    head = FailingPart(checkpoint.head, lambda name, _: name == "draft")
    lane = make_lane(head=head, clock=constant_clock())
    rows = []
    while lane.counters.head_healthy:
        rows.append(submit(lane, QUESTIONS[0], adaptive=True, max_tokens=120))
        run_until_idle(lane)
    rows.append(submit(lane, QUESTIONS[0], adaptive=True, looks_up=True, max_tokens=120))
    run_until_idle(lane)

    assert len(rows) == MAX_CONSECUTIVE_ERRORS + 1
    assert_matches_reference(checkpoint, *rows)
    assert rows[-1].row.speculation.accepted[DraftSource.LOOKUP] > 0
    report = lane.counters.report()
    assert report.bypass_counts == {Bypass.HEAD_UNHEALTHY: len(rows)}
    assert report.speculation.drafted == report.speculation.rejected + sum(
        (report.speculation.accepted, report.speculation.errors)
    )


def test_a_verify_that_fails_costs_drafts_and_no_answers(headless_lane, submit, ask) -> None:
    plain = families.tiny_llama(1000)
    alone = submit(lane := headless_lane(plain, draft_tokens=0), REPEATED, max_tokens=40)
    run_until_idle(lane)
    target = FailingPart(plain, lambda name, number: (name, number) == ("forward", 8))
    failing = headless_lane(target)
    result = ask(failing, REPEATED, max_tokens=40, adaptive=True, looks_up=True)

    assert isinstance(result.end, Finished)
    assert result.row.answer == alone.row.answer
    assert not result.row.draft_tokens


def test_an_answer_to_the_same_prompt_is_drafted_from_the_scope_of_its_isolation(
    headless_lane, submit, checkpoint, prompt_renderer
) -> None:
    """A retry finds the earlier answer in the prefix tree; another scope does not."""
    cache = PrefixCache(1 << 30)
    lane = headless_lane(prefix_cache=cache)

    def ask(scope: str):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
        text = prompt_renderer.chat(messages)
        prepared = prompt_renderer.prepare(Prompt(text=text, scope=scope, continues=True))
        result = submit(lane, prepared, adaptive=True, looks_up=True, max_tokens=24)
        result.row.ends = frozenset()
        run_until_idle(lane)
        return result.row

    first, other, retry = ask("a"), ask("b"), ask("a")
    assert first.answer == other.answer == retry.answer
    assert retry.speculation.accepted[DraftSource.LOOKUP] > max(
        row.speculation.accepted[DraftSource.LOOKUP] for row in (first, other)
    )


def test_a_row_of_a_deleted_scope_looks_up_nothing_more(headless_lane, submit) -> None:
    lane = headless_lane(families.tiny_llama(1000))
    result = submit(lane, REPEATED, max_tokens=40, adaptive=True, looks_up=True)
    for _ in range(5):
        lane.step()
    assert result.row.lookup is not None
    lane.stop_caching(None)
    lane.finish_open_steps()
    before = result.row.speculation.total().steps
    run_until_idle(lane)
    assert (result.row.lookup, result.end.speculation.steps) == (None, before)


def test_a_checkpoint_without_heads_has_both_lanes_and_drafts(checkpoint, monkeypatch) -> None:
    target = families.tiny_llama(checkpoint.vocabulary)
    other = replace(checkpoint, target=target, head=None, eos=frozenset())
    monkeypatch.setattr(assembly, "load_checkpoint", lambda *_, **__: other)
    engine = assembly.load_engine(EngineSettings(model=CHECKPOINT, served_name="other"))
    assert engine.card.lanes == (LaneName.TEXT_MTP, LaneName.VLM)
    assert (engine.card.looks_up, engine.card.mtp) == (True, False)
    for lane in engine.lanes:
        report = lane.counters.report()
        assert (report.mtp_enabled, report.head_healthy) == (True, True)
        assert report.effective_draft_tokens == 2
    silent = assembly.load_engine(
        EngineSettings(model=CHECKPOINT, served_name="other", draft_tokens=0)
    )
    assert silent.card.lanes == (LaneName.VLM,)
    assert not silent.card.looks_up
