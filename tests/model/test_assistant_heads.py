"""Assistants of Gemma 4: they draft from the keys and values of their model."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm.models.gemma4.config import TextConfig
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.speculative.drafters import load_drafter

from bench.families.checkpoints import VOCABULARY, write_checkpoint
from bench.families.checks import TURN_TOKENS, check_checkpoint
from bench.families.configs import family
from bench.families.heads import ASSISTED, write_assistant, write_head
from paceline.request.profile import Sampling
from workers.engine.decode.batch import row_cache, states_of
from workers.engine.decode.step_graph import StepGraph
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.model.mtp_head import AssistantHead, HeadUnusable, load_separate_head
from workers.engine.model.target import Target
from workers.engine.types import Finished

WINDOW = 24
LENGTHS = (40, 12)
DRAFTED = 3


def text_model() -> LanguageModel:
    """Make the language model of a Gemma 4 with vision, which is another class than that without.

    Its layers are those of E4B, whose last ones share keys and values.
    """
    mx.random.seed(0)
    config = family(ASSISTED).config(VOCABULARY, window_tokens=WINDOW)
    model = LanguageModel(TextConfig.from_dict(config))
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("clusters", [0, 32])
def test_an_assistant_drafts_in_a_batch_as_the_one_of_mlx_vlm_drafts_for_each_row(
    tmp_path: Path, clusters: int
) -> None:
    language = text_model()
    target = Target(language)
    config = family(ASSISTED).config(VOCABULARY, window_tokens=WINDOW)
    write_assistant(tmp_path, config, clusters=clusters)
    head = load_separate_head(tmp_path, target)
    assert isinstance(head, AssistantHead)
    reference, _ = load_drafter(str(tmp_path), kind="mtp")
    reference.set_dtype(mx.float32)

    expected, hidden = [], []
    joined: list[Any] = []
    for length in LENGTHS:
        tokens = mx.arange(100, 100 + length)[None]
        output = language(
            tokens, cache=target.new_caches(), return_hidden=True, return_shared_kv=True
        )
        last = language.speculative_draft_hidden(output.hidden_states[-1][:, -1:])
        expected.append(drafts_of(reference, language, last, output.shared_kv_states, length))
        caches = target.new_caches()
        hidden.append(target.forward(tokens, caches, mx.arange(length)[None])[:, -1:])
        assert mx.allclose(hidden[-1], last, atol=1e-4).item()
        rows = [row_cache(cache) for cache in caches]
        for cache, new in zip(joined, rows, strict=bool(joined)):
            cache.extend(new)
        joined = joined or rows
    graph = StepGraph(target, head)
    drafts, _ = graph.draft(
        (mx.concatenate(hidden), mx.array([7, 8]), mx.zeros((2, 0), dtype=mx.int32)),
        [],
        graph.attended_state(joined),
        mx.array(LENGTHS),
        DRAFTED,
    )
    assert drafts.tolist() == expected


def drafts_of(
    drafter: Any, language: LanguageModel, hidden: mx.array, shared: Any, length: int
) -> list[int]:
    drafter.reset(language)
    drafter.set_shared_kv(shared, length, position=length - 1, kv_valid_len=length)
    token = 7 + LENGTHS.index(length)
    drafts: mx.array = drafter.draft_block(
        token, hidden, None, DRAFTED + 1, lambda scores: mx.argmax(scores, axis=-1), greedy=True
    )
    return drafts[0].tolist()


def test_a_pass_of_a_batch_equals_that_of_mlx_vlm() -> None:
    """Rows of different lengths, several tokens at once, beyond the window."""
    language = text_model()
    target = Target(language)
    joined: list[Any] = []
    expected = []
    for length in LENGTHS:
        tokens = mx.arange(100, 100 + length + DRAFTED)[None]
        expected.append(language(tokens, cache=target.new_caches()).logits[:, -DRAFTED:])
        caches = target.new_caches()
        target.forward(tokens[:, :length], caches, mx.arange(length)[None])
        rows = [row_cache(cache) for cache in caches]
        for cache, new in zip(joined, rows, strict=bool(joined)):
            cache.extend(new)
        joined = joined or rows
    offset = mx.array(LENGTHS)
    tokens = 100 + offset[:, None] + mx.arange(DRAFTED)
    result = StepGraph(target, None).verify(
        tokens, states_of(joined), offset, mx.zeros_like(offset)
    )
    assert mx.allclose(result.scores, mx.concatenate(expected), atol=1e-3).item()


def test_answers_with_the_drafts_of_an_assistant_are_those_without(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family(ASSISTED), window_tokens=WINDOW)
    write_head(tmp_path / "head", family(ASSISTED))
    checks = check_checkpoint(
        tmp_path / "model", prompt_lengths=(20, 60), answer_tokens=28, mtp=tmp_path / "head"
    )
    assert checks.problems == []
    assert checks.mtp
    assert checks.drafted_by_head > 0
    assert checks.accepted > 0, "of prompt lookup, in turns with the assistant"
    assert checks.prompt_tokens - checks.cached_tokens == 2 * (TURN_TOKENS + 1)


def test_an_assistant_begins_with_the_state_of_the_model_after_the_last_step(
    tmp_path: Path, make_lane: Any, submit: Any
) -> None:
    write_checkpoint(tmp_path / "model", family(ASSISTED))
    write_head(tmp_path / "head", family(ASSISTED))
    checkpoint = load_checkpoint(tmp_path / "model", mtp=tmp_path / "head")
    target = checkpoint.target
    lane = make_lane(target=target, head=checkpoint.head, eos=frozenset())
    prompt = [*range(100, 120)] * 3
    repeating = Sampling(temperature=0, logit_bias=((100, 1e3),))
    result = submit(lane, prompt, max_tokens=20, looks_up=True, sampling=repeating)
    compared = 0
    while lane.busy:
        lane.step()
        lane.finish_open_steps()
        for batch in lane._decoder._batches:
            if batch.rows:
                tokens = [*prompt, *result.row.answer[:-1]]
                positions = mx.arange(len(tokens))[None]
                states = target.forward(mx.array([tokens]), target.new_caches(), positions)
                assert mx.allclose(batch.seed_hidden, states[:, -1:], atol=1e-2).item()
                compared += 1
    assert isinstance(result.end, Finished)
    assert result.end.speculation.accepted > 0
    assert result.end.speculation.drafted_by_source.keys() == {"head", "lookup"}
    assert compared > 2


def test_a_gemma_without_an_assistant_says_where_one_would_be(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family(ASSISTED))
    assert "--mtp" in (load_checkpoint(tmp_path).mtp_unavailable_reason or "")


def test_an_assistant_of_another_size_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", family(ASSISTED))
    config = family(ASSISTED).config(VOCABULARY) | {"hidden_size": 128}
    write_assistant(tmp_path / "head", config)
    with pytest.raises(HeadUnusable, match="its hidden size is 128, and that of the model 64"):
        load_checkpoint(tmp_path / "model", mtp=tmp_path / "head")
