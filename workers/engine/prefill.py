"""Read a prompt into fresh caches, a chunk at a time, target and MTP head side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from workers.engine.model import KVCache, LayerCache, MtpHead, PromptEmbedding, Target
from workers.engine.prefix_cache import (
    CachedPrefix,
    PrefixCache,
    detached,
    restore_caches,
    save_caches,
)
from workers.engine.prompt_scorer import PromptScoring
from workers.engine.row import Row
from workers.engine.types import InvalidGeneration


@dataclass(slots=True, kw_only=True, eq=False)
class Prefill:
    """A row whose prompt is being read. Pictures are read with the first chunk's forward pass."""

    row: Row
    tokens: Sequence[int]
    """The prompt, and what was answered before a round failed: all that the caches must hold."""
    caches: list[LayerCache]
    head: MtpHead | None
    """None where there is none, or it has failed on this very prompt."""
    head_caches: list[KVCache]
    head_error: Exception | None = None
    """What the head raised, until somebody takes note of it."""
    prompt_embedding: PromptEmbedding | None = None
    read_indices: Sequence[int]
    """Which of the tokens are read, in order: all, or those that a draft model kept."""
    scoring: PromptScoring | None = None
    """Set while a draft model looks for them; nothing is read meanwhile."""
    read_count: int = 0
    """How many of them are in the target's caches; the head's hold one less."""
    prefix_tokens: int = 0
    """Where the shared beginning of the prompt ends, if it is to be kept once it is read."""
    last_hidden: mx.array | None = None
    """[1, 1, width] of the last token read."""
    scores: mx.array | None = field(default=None)
    """[1, 1, vocabulary] behind the whole prompt, once it has been read."""

    @property
    def complete(self) -> bool:
        """Say whether the whole prompt has been read."""
        return self.read_count == len(self.read_indices)


def start_prefill(
    row: Row, target: Target, head: MtpHead | None, prefix_cache: PrefixCache
) -> Prefill:
    """Open the caches of a row, look at its pictures, and start from a snapshot if there is one."""
    caches, embedding = target.new_caches(), None
    if row.prompt.media:
        media = {name: mx.array(array) for name, array in row.prompt.media.items()}
        try:
            embedding = target.embed(mx.array([row.prompt.tokens], dtype=mx.int32), media)
        except ValueError as error:  # as many marks as pictures take, or it is no prompt
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
    prefix = row.prompt.prefix
    if prefix is not None and target.supports_prefix_cache and not (embedding and embedding.extras):
        snapshot = prefix_cache.lookup(prefix.key, row.prompt.tokens)
        if snapshot is None and row.prefetched is not None:
            snapshot = prefix_cache.store_prefetched(prefix.key, row.prompt.tokens, row.prefetched)
        row.prefetched = None
        # A lane whose head is unhealthy keeps prefix_cache without it: of no use to one that
        # drafts.
        if snapshot is None or (head and not snapshot.head_caches):
            prefill.prefix_tokens = prefix.tokens
        else:
            restore_caches(prefill.caches, snapshot.caches)
            if head:
                restore_caches(prefill.head_caches, snapshot.head_caches)
            prefill.last_hidden = snapshot.last_hidden
            prefill.read_count = len(snapshot.tokens)
            if not row.answer:
                row.cached_tokens = prefill.read_count
    return prefill


def prefill_chunk(prefill: Prefill, target: Target, chunk_tokens: int) -> None:
    """Read the next `chunk_tokens` of the prompt at most, or of the answer before a failure."""
    row = prefill.row
    begin = prefill.read_count
    end = min(begin + chunk_tokens, len(prefill.read_indices))
    if begin < prefill.prefix_tokens:
        end = min(end, prefill.prefix_tokens)  # the caches are kept as they are right there
    embedding = prefill.prompt_embedding if begin < len(row.prompt.tokens) else None
    if embedding is not None:
        # What the family adds beside its embeddings cannot be cut in pieces.
        end = len(row.prompt.tokens) if embedding.extras else min(end, len(row.prompt.tokens))
    reads = prefill.read_indices[begin:end]
    positions = mx.array([list(reads)], dtype=mx.int32)
    if embedding is not None and embedding.positions is not None:
        positions = embedding.positions[..., begin:end]
    elif begin >= len(row.prompt.tokens):
        positions = positions + row.position_offset
    forward = target.forward(
        mx.array([[prefill.tokens[at] for at in reads]], dtype=mx.int32),
        prefill.caches,
        positions,
        embeddings=embedding.embeddings[:, begin:end] if embedding else None,
        extras=embedding.extras if embedding else None,
    )
    if prefill.head is not None and forward.hidden is not None:
        try:
            _read_with_head(prefill, prefill.head, forward.hidden, begin, end)
        except Exception as error:  # noqa: BLE001  # the target needs no head to go on
            prefill.head, prefill.head_caches, prefill.head_error = None, [], error
            prefill.prefix_tokens = 0  # a snapshot without the head would be of no use to others
    prefill.read_count = end
    if forward.hidden is not None:
        prefill.last_hidden = forward.hidden[:, -1:]
    if prefill.complete:
        prefill.scores = target.scores(forward, last=1)
    mx.eval(
        prefill.last_hidden if prefill.scores is None else (prefill.scores, prefill.last_hidden),
        [cache.state for cache in (*prefill.caches, *prefill.head_caches) if not cache.empty()],
    )


def make_cached_prefix(prefill: Prefill) -> CachedPrefix | None:
    """Return what is worth keeping if the shared beginning has just been read."""
    if not prefill.prefix_tokens or prefill.read_count != prefill.prefix_tokens:
        return None
    prefill.prefix_tokens = 0
    snapshot = CachedPrefix(
        tokens=prefill.row.prompt.tokens[: prefill.read_count],
        caches=save_caches(prefill.caches),
        head_caches=save_caches(prefill.head_caches),
        last_hidden=None if prefill.last_hidden is None else detached(prefill.last_hidden),
    )
    mx.eval(snapshot.arrays)
    return snapshot


def _read_with_head(
    prefill: Prefill, head: MtpHead, hidden: mx.array, begin: int, end: int
) -> None:
    """Give the head what it can pair: the hidden state of token i with token i + 1.

    Its positions are slot numbers, as they are when it drafts: tokens left out leave no gap, which
    costs no acceptance (true positions, tried on the demo model, were accepted no more often).
    """
    tokens = prefill.tokens
    if prefill.last_hidden is not None:
        hidden = mx.concatenate([prefill.last_hidden, hidden[:, :-1]], axis=1)
        begin -= 1
    else:
        hidden = hidden[:, :-1]
    reads = prefill.read_indices[begin : end - 1]
    if reads:
        head.forward(
            mx.array([[tokens[at + 1] for at in reads]], dtype=mx.int32),
            hidden,
            prefill.head_caches,
            mx.arange(begin, end - 1, dtype=mx.int32)[None],
        )


def seed_head(prefill: Prefill, head: MtpHead, last_token: int) -> mx.array:
    """Show the head the last token of the answer; return the state [1, 1, width] that drafts."""
    assert prefill.last_hidden is not None
    position = len(prefill.read_indices) - 1
    return head.forward(
        mx.array([[last_token]], dtype=mx.int32),
        prefill.last_hidden,
        prefill.head_caches,
        mx.array([[position]], dtype=mx.int32),
    )
