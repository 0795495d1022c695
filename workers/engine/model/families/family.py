"""The record of a family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from workers.engine.model.head_formats import HeadFormat
from workers.engine.model.kv_cache import RowCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the language models of a family are run; the defaults are those of most."""

    own_pass: Callable[[Any, mx.array, Sequence[Any]], mx.array] | None = None
    """Runs tokens [rows, L] of a batch at every row's cursor, given language model and caches, in
    place of mlx-vlm's pass; returns the same."""
    own_prefill: bool = False
    """Whether it reads prompts too."""
    adapt: Callable[[RowCache], Any] | None = None
    """Returns the cache that mlx-vlm's pass gets for that of a batch."""
    score: Callable[[Any, mx.array], mx.array] | None = None
    """Returns the scores of hidden states, if a pass returns these; an MTP head reads them."""
    takes_positions: bool = False
    """Whether a pass takes positions, [3, rows, L]; else it finds them in the caches."""
    keeps_positions: bool = False
    """Whether the model keeps the positions of a prompt with pictures; else it returns them."""
    explicit_positions: bool = False
    """Whether positions suffice to place the tokens of a batch."""
    compiles: bool = False
    """Whether a pass reads no value on the host, so that it can be compiled."""
    head: HeadFormat | None = None
    """How an MTP head of the family is stored; None: the engine knows none."""


def score(language: Any, hidden: mx.array) -> mx.array:
    """Return the scores [rows, L, vocabulary] of hidden states, by the output layer of most."""
    if "lm_head" in language:
        return language.lm_head(hidden)
    return language.model.embed_tokens.as_linear(hidden)
