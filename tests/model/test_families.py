"""Model families: each loads, batches, drafts and reuses what it has read, and answers exactly.

Those that take another path through our own code run in every test run, the others as proofs, and
`python -m bench.families` checks each of them in every format.
"""

import itertools
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bench.families.checkpoints import FORMATS, write_checkpoint
from bench.families.checks import TURN_TOKENS, check_checkpoint
from bench.families.configs import FAMILIES, Family, family
from workers.engine.model.checkpoint import load_checkpoint
from workers.engine.model.kv_cache import RowCache
from workers.engine.model.target import Target
from workers.engine.startup.probes import probe_compiled_passes

WINDOWED = [one for one in FAMILIES if one.window and not one.processor]
"""Those whose language model is that of another family, but for pictures, are left out."""
SAMPLE = frozenset(("Qwen3-Next", "Qwen3-VL MoE", "Mistral", "GLM-4.7-Flash", "LFM2", "Gemma 2"))
"""Linear attention, positions of tokens, none of them, latent keys, convolutions, grouped masks."""
WINDOWED_SAMPLE = frozenset(("Llama 4", "gpt-oss", "MiMo-V2-Flash"))
"""Chunks, sinks, and values of another width; `test_assistant_heads.py` has Gemma 4."""
SMALL_WINDOW = 24
UNREAD_TOKENS = TURN_TOKENS + 1
"""Of a second turn: those that are new, and the last one of the answer before."""


def cases(families: Sequence[Family], sample: Set[str]) -> list[Any]:
    """Return each family with its number, and those outside of the sample as proofs."""
    return [
        pytest.param(n, one, id=one.name, marks=() if one.name in sample else pytest.mark.proof)
        for n, one in enumerate(families)
    ]


@pytest.mark.parametrize(("number", "one"), cases(FAMILIES, SAMPLE))
def test_a_family_with_its_published_configuration(tmp_path, number, one) -> None:
    """In one format each; as long as the window of most families is beyond any short prompt."""
    write_checkpoint(tmp_path, one, FORMATS[number % len(FORMATS)])
    checks = check_checkpoint(
        tmp_path, prompt_lengths=(40, 90), answer_tokens=12, mlx_lm=one.mlx_lm
    )
    assert checks.problems == []
    assert checks.batches
    assert checks.drafted > 0
    assert checks.most_rows == 2
    assert checks.prompt_tokens - checks.cached_tokens == 2 * UNREAD_TOKENS


@pytest.mark.parametrize(("_", "one"), cases(WINDOWED, WINDOWED_SAMPLE))
def test_rows_go_round_their_rings(tmp_path: Path, _: int, one: Family) -> None:
    write_checkpoint(tmp_path, one, window_tokens=SMALL_WINDOW)
    checks = check_checkpoint(
        tmp_path, prompt_lengths=(20, 25, 60), answer_tokens=28, mlx_lm=one.mlx_lm
    )
    assert checks.problems == []
    assert checks.window_tokens == SMALL_WINDOW
    assert checks.most_rows == 3
    assert checks.drafted > checks.accepted > 0, "rejected drafts are rolled back in the rings"
    assert checks.prompt_tokens - checks.cached_tokens == 3 * UNREAD_TOKENS


def test_compiled_passes_answer_as_others_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family("Llama 3"))
    checks = check_checkpoint(tmp_path, compiled=True)
    assert checks.compiles == (True, True)
    assert checks.problems == []
    assert checks.accepted > 0


def test_a_family_that_reads_a_cursor_on_the_host_is_not_compiled(tmp_path: Path) -> None:
    """One that raises in a trace, and one that goes on with the cursor of the first call."""

    class Raises(Target):
        def forward(self, tokens: mx.array, caches: Any, *inputs: Any, **more: Any) -> mx.array:
            rows = [cache for cache in caches if isinstance(cache, RowCache)]
            if rows and tokens.shape[1] > 1:
                assert rows[0].offset.max().item() > 0
            return super().forward(tokens, caches, *inputs, **more)

    class Remembers(Target):
        def forward(self, tokens: mx.array, caches: Any, *inputs: Any, **more: Any) -> mx.array:
            rows = [cache for cache in caches if isinstance(cache, RowCache)]
            if rows:
                tokens = tokens + mx.array([[7 * next(numbers)]] * len(rows[0].offset))
            return super().forward(tokens, caches, *inputs, **more)

    numbers = itertools.count()
    write_checkpoint(tmp_path, family("Llama 3"))
    model = load_checkpoint(tmp_path).target.model
    assert probe_compiled_passes(Raises(model)) == (True, False)
    assert probe_compiled_passes(Remembers(model)) == (False, False)


def test_a_sparse_configuration_means_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Google publishes Gemma 3 without the vocabulary and the context of its text model."""
    gemma = family("Gemma 3")
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6}
    small = replace(gemma, text=narrow)
    write_checkpoint(tmp_path, small, vocabulary=None)
    checkpoint = load_checkpoint(tmp_path)
    assert (checkpoint.vocabulary, checkpoint.context_tokens) == (262_208, 131_072)
