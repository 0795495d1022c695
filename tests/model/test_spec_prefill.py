"""Sparse prefill: true positions, no effect on other rows, and a full prefill in case of doubt."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from tests.support.engine_lane import run_until_idle
from tests.support.failing_model import FailingPart
from workers.engine.decode.spec_prefill import FullPrefillReason, PromptScoring, ScoringRange
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.lane.sparse_prefill import SparsePrefill, load_sparse_prefill
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.model.target import Target
from workers.engine.prefix.cache import PrefixCache
from workers.engine.types import (
    Finished,
    LaneName,
    Picture,
    Prompt,
    SpecPrefillOptions,
    SpecPrefillSettings,
)

FILLER = "The red fox sees the old tree. The blue boat finds the warm stone. " * 11
LONG = FILLER + "The code word is river. " + FILLER + "What is the code word?"
SYSTEM = "You are the help desk of a small shop. " + FILLER
QUESTIONS = ["Hello", "Count from 1 to 9.", "Tell me a story about a fox."]
SPARSE = SpecPrefillOptions(sparse=True)


@pytest.fixture
def settings(tmp_path) -> SpecPrefillSettings:
    return SpecPrefillSettings(draft=tmp_path, threshold_tokens=300, keep_share=0.3)


@pytest.fixture
def sparse_lane(make_lane, settings, checkpoint) -> Callable[..., LaneScheduler]:
    """Return a function that makes a lane with sparse prefill from 300 tokens on."""

    def make(
        *name: LaneName,
        draft: Target | None = checkpoint.target,
        draft_context_tokens: int = checkpoint.context_tokens,
        **settings_: Any,
    ) -> LaneScheduler:
        sparse_prefill = SparsePrefill(settings, draft, draft_context_tokens)
        return make_lane(*name, sparse_prefill=sparse_prefill, **settings_)

    return make


def spec_prefill_counts(lane: LaneScheduler) -> Any:
    return lane.counters.report().spec_prefill


def greedy_after(
    checkpoint: Checkpoint, prompt: Sequence[int], indices: Sequence[int], answer_tokens: int
) -> Iterator[int]:
    """Read the tokens at these indices, at their positions, and decode with mlx-vlm alone."""
    language = checkpoint.target.language
    caches = language.make_cache()
    tokens, positions = [prompt[at] for at in indices], list(indices)
    for step in range(answer_tokens):
        at = mx.broadcast_to(mx.array(positions)[None, None], (3, 1, len(positions)))
        scores = language(mx.array([tokens]), cache=caches, position_ids=at).logits
        token = int(mx.argmax(scores[0, -1]).item())
        yield token
        tokens, positions = [token], [len(prompt) + step]


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_selected_tokens_are_read_at_their_true_positions_and_the_others_are_counted(
    checkpoint, sparse_lane, ask, draft_tokens
) -> None:
    lane = sparse_lane(draft_tokens=draft_tokens)
    results = ask(lane, LONG, draft_tokens=draft_tokens)
    prompt = results.row.prompt.tokens
    scope = ScoringRange(begin=0, end=len(prompt), keep_share=0.3)
    scoring = PromptScoring(checkpoint.target, prompt, scope)
    while scoring.selected is None:
        scoring.advance(512)

    expected = list(greedy_after(checkpoint, prompt, scoring.selected, len(results.row.answer)))
    assert results.row.skipped_tokens == len(prompt) - len(scoring.selected) > 0.6 * len(prompt)
    assert results.row.answer == expected
    usage, counts = results.end.usage, spec_prefill_counts(lane)
    assert (usage.prompt_tokens, usage.skipped_tokens) == (len(prompt), results.row.skipped_tokens)
    assert counts.prompts == 1
    assert counts.scored_tokens - counts.selected_tokens == usage.skipped_tokens


def test_selecting_every_token_gives_exactly_the_full_answer(
    make_lane, sparse_lane, submit
) -> None:
    plain, lane = make_lane(), sparse_lane()
    expected = submit(plain, LONG)
    result = submit(lane, LONG, spec_prefill=SpecPrefillOptions(keep_share=0.9999))
    run_until_idle(plain, lane)

    assert result.row.answer == expected.row.answer
    assert result.row.speculation.total() == expected.row.speculation.total()
    assert spec_prefill_counts(lane).selected_tokens == spec_prefill_counts(lane).scored_tokens


def test_rows_in_a_batch_with_a_sparse_row_get_the_same_answers(sparse_lane, submit, ask) -> None:
    alone = [ask(sparse_lane(), question).row.answer for question in (LONG, *QUESTIONS)]
    lane = sparse_lane(chunk_tokens=64)
    early = [submit(lane, question) for question in QUESTIONS[:2]]
    lane.step()
    sparse = submit(lane, LONG)
    late = ask(lane, QUESTIONS[2])

    assert sparse.row.skipped_tokens
    assert [result.row.answer for result in (sparse, *early, late)] == alone


def test_other_rows_continue_while_a_prompt_is_scored(sparse_lane, submit) -> None:
    lane = sparse_lane(chunk_tokens=64)
    early = submit(lane, QUESTIONS[2], max_tokens=200)
    lane.step()
    result = submit(lane, LONG)
    added = []
    while not result.row.skipped_tokens and early.end is None:
        before = len(early.row.answer)
        lane.step()
        added.append(len(early.row.answer) - before)

    assert len(added) > 4
    assert all(added)


def test_a_row_cancelled_during_scoring_is_removed(sparse_lane, submit) -> None:
    lane = sparse_lane(chunk_tokens=64)
    result = submit(lane, LONG)
    lane.step()
    result.row.cancelled = True
    lane.step()

    assert not lane.busy
    assert result.row.answer == []


def test_only_the_tokens_after_a_cached_prefix_are_scored(sparse_lane, ask) -> None:
    prefix_cache = PrefixCache(1 << 30)
    cold_lane = sparse_lane()
    cold = ask(cold_lane, LONG, system=SYSTEM)
    lane = sparse_lane(prefix_cache=prefix_cache)
    ask(lane, "Hello", system=SYSTEM)
    warm = ask(lane, LONG, system=SYSTEM)

    prefix = warm.row.prompt.prefix
    assert prefix is not None
    assert warm.row.cached_tokens == prefix.tokens
    assert spec_prefill_counts(lane).scored_tokens == len(warm.row.prompt.tokens) - prefix.tokens
    assert warm.row.skipped_tokens == cold.row.skipped_tokens > 0
    assert warm.row.answer == cold.row.answer


def test_a_sparse_prefix_is_never_cached(make_lane, sparse_lane, submit, ask) -> None:
    prefix_cache = PrefixCache(1 << 30)
    lane = sparse_lane(prefix_cache=prefix_cache)
    requested = ask(lane, LONG, system=SYSTEM, spec_prefill=SPARSE)
    assert requested.row.skipped_tokens
    assert prefix_cache.keys == ()

    # Without the option, the shared prefix is read in full, and cached for later requests.
    submit(lane, LONG, system=SYSTEM)
    second = submit(lane, "Hello", system=SYSTEM)
    plain_lane = make_lane()
    plain = submit(plain_lane, "Hello", system=SYSTEM)
    run_until_idle(lane, plain_lane)
    assert len(prefix_cache.keys) == 1
    assert second.row.cached_tokens > 0
    assert second.row.answer == plain.row.answer


@pytest.mark.parametrize(
    "case",
    [
        (SpecPrefillOptions(sparse=False), lambda _: {}, FullPrefillReason.SWITCHED_OFF),
        (SpecPrefillOptions(keep_share=1.0), lambda _: {}, FullPrefillReason.KEEPS_ALL),
        (SpecPrefillOptions(), lambda _: {"draft": None}, FullPrefillReason.NO_DRAFT),
        (
            SpecPrefillOptions(),
            lambda _: {"draft_context_tokens": 300},
            FullPrefillReason.TOO_LONG_FOR_DRAFT,
        ),
        (
            SpecPrefillOptions(),
            lambda target: {"draft": FailingPart(target, lambda _, number: number == 1)},
            FullPrefillReason.DRAFT_FAILED,
        ),
    ],
)
def test_each_reason_for_a_full_prefill_gives_the_full_answer_and_is_counted(
    checkpoint, make_lane, sparse_lane, submit, case
) -> None:
    options, draft_of, reason = case
    lane, plain = sparse_lane(**draft_of(checkpoint.target)), make_lane()
    result, expected = submit(lane, LONG, spec_prefill=options), submit(plain, LONG)
    run_until_idle(lane, plain)

    assert result.row.answer == expected.row.answer
    assert result.row.skipped_tokens == 0
    assert spec_prefill_counts(lane).full_prefills == {reason: 1}
    assert spec_prefill_counts(lane).prompts == 0


@pytest.mark.parametrize(
    ("options", "tokens", "sparse_read"),
    [
        (SpecPrefillOptions(), 299, False),
        (SpecPrefillOptions(), 300, True),
        (SPARSE, 255, False),
        (SPARSE, 256, True),
    ],
)
def test_a_prompt_is_read_sparsely_from_the_threshold_or_on_request(
    sparse_lane, ask, options, tokens, sparse_read
) -> None:
    lane = sparse_lane()
    result = ask(lane, [20 + i % 700 for i in range(tokens)], max_tokens=1, spec_prefill=options)

    assert bool(result.row.skipped_tokens) is sparse_read
    assert spec_prefill_counts(lane).full_prefills == (
        {} if sparse_read else {FullPrefillReason.TOO_SHORT: 1}
    )


def test_a_prompt_with_pictures_is_read_in_full(sparse_lane, submit, prompt_renderer) -> None:
    red = Picture(width_px=64, height_px=64, rgb=bytes([255, 0, 0]) * 64 * 64)
    content = [{"type": "image_url"}, {"type": "text", "text": LONG}]
    text = prompt_renderer.chat([{"role": "user", "content": content}])
    lane = sparse_lane(LaneName.VLM)
    result = submit(lane, "Hello", max_tokens=2, spec_prefill=SPARSE)
    result.row.prompt = prompt_renderer.prepare(Prompt(text=text, pictures=(red,)))
    run_until_idle(lane)

    assert isinstance(result.end, Finished)
    assert spec_prefill_counts(lane).full_prefills == {FullPrefillReason.PICTURES: 1}


def test_a_worker_without_a_draft_model_counts_only_requests_for_sparse_prefill(
    make_lane, submit
) -> None:
    lane = make_lane()
    results = [submit(lane, "Hello"), submit(lane, "Hello", spec_prefill=SPARSE)]
    run_until_idle(lane)

    assert results[0].row.answer == results[1].row.answer
    assert spec_prefill_counts(lane).full_prefills == {FullPrefillReason.NO_DRAFT: 1}


def test_a_worker_serves_although_its_draft_model_cannot_be_loaded(
    checkpoint, make_lane, ask, settings
) -> None:
    sparse_prefill = load_sparse_prefill(settings, checkpoint)  # an empty folder
    lane = make_lane(sparse_prefill=sparse_prefill)
    result = ask(lane, LONG)

    assert sparse_prefill.description is not None
    assert "in full" in sparse_prefill.description
    assert isinstance(result.end, Finished)
    assert spec_prefill_counts(lane).full_prefills == {FullPrefillReason.NO_DRAFT: 1}
