"""Prefill: read a prompt into new caches, a chunk at a time, with the target and the MTP head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from workers.engine.batch import set_states
from workers.engine.model import KVCache, LayerCache, MtpHead, PromptEmbedding, Target
from workers.engine.prefix_cache import PrefixCache
from workers.engine.prompt_scorer import PromptScoring
from workers.engine.row import Row
from workers.engine.types import InvalidGeneration


@dataclass(slots=True, kw_only=True, eq=False)
class Prefill:
    """Prefill of one row."""

    row: Row
    tokens: Sequence[int]
    """The prompt, and the answer so far of a requeued row: all that the caches must hold."""
    caches: list[LayerCache]
    head: MtpHead | None
    """None if there is no usable head, or it failed on this prompt."""
    head_caches: list[KVCache]
    prompt_embedding: PromptEmbedding | None = None
    read_indices: Sequence[int]
    """Indices of the tokens to read, in order: all, or the selection of a draft model."""
    scoring: PromptScoring | None = None
    """Set while a draft model selects them; the target reads nothing meanwhile."""
    read_count: int = 0
    """Number of indices read by the target; the head has read one less."""
    prefix_tokens: int = 0
    """Length of the shared prefix if it is to be stored once it is read, else 0."""
    last_hidden: mx.array | None = None
    """[1, 1, width] of the last token read."""
    scores: mx.array | None = None
    """[1, 1, vocabulary] after the last token, once all are read."""

    @property
    def complete(self) -> bool:
        """Return whether all tokens have been read."""
        return self.read_count == len(self.read_indices)


def start_prefill(
    row: Row, target: Target, head: MtpHead | None, prefix_cache: PrefixCache
) -> Prefill:
    """Create the caches of a row, embed its pictures, and restore its prefix if it is cached."""
    caches, embedding = target.new_caches(), None
    if row.prompt.media:
        media = {name: mx.array(array) for name, array in row.prompt.media.items()}
        try:
            embedding = target.embed(mx.array([row.prompt.tokens], dtype=mx.int32), media)
        except ValueError as error:  # the prompt has more or fewer marks than the pictures take
            raise InvalidGeneration(
                "messages", "The pictures do not fit the places for them in the prompt."
            ) from error
        row.position_offset = embedding.position_offset
    tokens = (*row.prompt.tokens, *row.answer[:-1])
    prefill = Prefill(
        row=row,
        tokens=tokens,
        caches=caches,
        head=head,
        head_caches=head.new_caches() if head else [],
        prompt_embedding=embedding,
        read_indices=range(len(tokens)),
    )
    if target.supports_prefix_cache and not (embedding and embedding.extras):
        _restore_prefix(prefill, prefix_cache)
    return prefill


def _restore_prefix(prefill: Prefill, prefix_cache: PrefixCache) -> None:
    """Start from the cached prefix of the prompt, or mark the prefix to be stored."""
    row, prefix = prefill.row, prefill.row.prompt.prefix
    if prefix is None:
        return
    entry = prefix_cache.lookup(prefix.key, row.prompt.tokens, row.prefetched)
    row.prefetched = None
    # A lane with an unhealthy head stores prefixes without it, which a drafting row cannot use.
    if entry is None or (prefill.head and not entry.head_caches):
        prefill.prefix_tokens = prefix.tokens
        return
    set_states(prefill.caches, entry.caches)
    if prefill.head:
        set_states(prefill.head_caches, entry.head_caches)
    prefill.last_hidden = entry.last_hidden
    prefill.read_count = len(entry.tokens)
    if not row.answer:
        row.cached_tokens = prefill.read_count


def prefill_chunk(prefill: Prefill, target: Target, chunk_tokens: int) -> Exception | None:
    """Read up to `chunk_tokens` more tokens of the prompt, or of a requeued row's answer.

    Returns the error of the head if it failed: the target then goes on without it.
    """
    row, head_error = prefill.row, None
    begin = prefill.read_count
    end = min(begin + chunk_tokens, len(prefill.read_indices))
    if begin < prefill.prefix_tokens:
        end = min(end, prefill.prefix_tokens)  # the cache stores the state right there
    embedding = prefill.prompt_embedding if begin < len(row.prompt.tokens) else None
    if embedding is not None:
        # The family's extras apply to the whole prompt and cannot be split.
        end = len(row.prompt.tokens) if embedding.extras else min(end, len(row.prompt.tokens))
    indices = prefill.read_indices[begin:end]
    positions = mx.array([list(indices)], dtype=mx.int32)
    if embedding is not None and embedding.positions is not None:
        positions = embedding.positions[..., begin:end]
    elif begin >= len(row.prompt.tokens):
        positions = positions + row.position_offset
    output = target.forward(
        mx.array([[prefill.tokens[at] for at in indices]], dtype=mx.int32),
        prefill.caches,
        positions,
        embeddings=embedding.embeddings[:, begin:end] if embedding else None,
        extras=embedding.extras if embedding else None,
    )
    if prefill.head is not None:
        try:
            _prefill_head(prefill, prefill.head, output, begin, end)
        except Exception as error:  # noqa: BLE001  # the target needs no head to go on
            prefill.head, prefill.head_caches, head_error = None, [], error
            prefill.prefix_tokens = 0  # drafting rows could not use a prefix without the head
    prefill.read_count = end
    if target.explicit_positions:
        prefill.last_hidden = output[:, -1:]
    if prefill.complete:
        prefill.scores = target.scores(output, last=1)
    mx.eval(
        prefill.last_hidden if prefill.scores is None else (prefill.scores, prefill.last_hidden),
        [cache.state for cache in (*prefill.caches, *prefill.head_caches) if not cache.empty()],
    )
    return head_error


def _prefill_head(prefill: Prefill, head: MtpHead, hidden: mx.array, begin: int, end: int) -> None:
    """Let the head read pairs of the hidden state of token i and token i + 1.

    Its positions are slot numbers, as they are when it drafts: skipped tokens leave no gap. This
    costs no acceptance (with true positions the demo model accepted no more drafts).
    """
    if prefill.last_hidden is not None:
        hidden = mx.concatenate([prefill.last_hidden, hidden[:, :-1]], axis=1)
        begin -= 1
    else:
        hidden = hidden[:, :-1]
    following = [prefill.tokens[at + 1] for at in prefill.read_indices[begin : end - 1]]
    if following:
        _forward_head(prefill, head, following, hidden, begin)


def seed_head(prefill: Prefill, head: MtpHead, last_token: int) -> mx.array:
    """Let the head read the last token of the answer; return its state [1, 1, width]."""
    assert prefill.last_hidden is not None
    begin = len(prefill.read_indices) - 1
    return _forward_head(prefill, head, [last_token], prefill.last_hidden, begin)


def _forward_head(
    prefill: Prefill, head: MtpHead, tokens: list[int], hidden: mx.array, begin: int
) -> mx.array:
    positions = mx.arange(begin, begin + len(tokens), dtype=mx.int32)[None]
    ids = mx.array([tokens], dtype=mx.int32)
    return head.forward(ids, hidden, prefill.head_caches, positions)
