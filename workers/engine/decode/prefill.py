"""Prefill: read a prompt into new caches, a chunk at a time, with the target and the MTP head."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import numpy as np

from workers.engine.decode.row import Row
from workers.engine.decode.spec_prefill import PromptScoring
from workers.engine.model.kv_cache import KVCache, LayerCache
from workers.engine.model.mtp_head import MtpHead
from workers.engine.model.target import PromptEmbedding, Target
from workers.engine.prefix.cache import MIN_TOKENS, SNAPSHOT_INTERVAL_TOKENS, PrefixCache
from workers.engine.prefix.tree import Match, RowState, TokenArray, common_length, state_of
from workers.engine.text.tokenizer import PreparedPrompt
from workers.engine.types import InvalidGeneration

_SHORT_TURN_TOKENS = 256
"""A message of fewer tokens is read again if the client changes the text after it."""
_MAX_CHECKPOINTS = 64
"""Ends of messages at which the prefix cache stores the caches of one prompt."""


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
    boundaries: list[int] = field(default_factory=list)
    """Lengths at which the prefix cache stores the caches, ascending; those reached are removed."""
    last_hidden: mx.array | None = None
    """[1, 1, width] of the last token read."""
    scores: mx.array | None = None
    """[1, 1, vocabulary] after the last token, once all are read."""

    @property
    def complete(self) -> bool:
        """Return whether all tokens have been read."""
        return self.read_count == len(self.read_indices)

    @property
    def remaining_tokens(self) -> int:
        """Return how many tokens are still to be read."""
        return len(self.read_indices) - self.read_count

    @property
    def next_tokens(self) -> int:
        """Return how many tokens the next chunk may have: it ends where the cache stores it."""
        end = self.boundaries[0] if self.boundaries else len(self.read_indices)
        return min(end, len(self.read_indices)) - self.read_count

    def tokens_for(self, row: Row) -> int:
        """Return how many tokens of a waiting row the prefix cache will have at a boundary."""
        if row.prompt.scope is None or row.prompt.scope != self.row.prompt.scope:
            return 0
        shared = common_length(row.prompt.identity, self.row.prompt.identity)
        most = min(shared, row.context_tokens - 1)
        return max((end for end in self.boundaries if end <= most), default=0)

    @property
    def arrays(self) -> list[object]:
        """Return the work of a chunk."""
        caches = [cache for cache in (*self.caches, *self.head_caches) if not cache.empty()]
        return [self.scores, self.last_hidden, *(cache.state for cache in caches)]

    def state(self) -> RowState:
        """Return the state after the tokens read so far, for the prefix cache."""
        return state_of(self.caches, self.head_caches, self.last_hidden)


def start_prefill(
    row: Row, target: Target, head: MtpHead | None, prefix_cache: PrefixCache
) -> Prefill:
    """Create the caches of a row, embed its pictures, and restore its prefix if it is cached."""
    caches, embedding, prompt = target.new_caches(), None, row.prompt
    if prompt.media:
        media = {name: mx.array(array) for name, array in prompt.media.items()}
        digests = prompt.identity[prompt.identity < 0].tobytes()  # of all pictures
        key = None if prompt.scope is None else (prompt.scope, digests)
        try:
            embedding = target.embed(mx.array([prompt.tokens], dtype=mx.int32), media, key)
        except ValueError as error:  # the prompt has more or fewer marks than the pictures take
            raise InvalidGeneration(
                "messages", "The pictures do not fit the places for them in the prompt."
            ) from error
        row.position_offset = embedding.position_offset
    tokens = (*prompt.tokens, *row.answer[:-1])
    if row.prompt_logprobs is not None and not row.answer:
        row.prompt_logprobs.clear()
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
        _restore_prefix(prefill, target, prefix_cache)
    return prefill


def context_of(row: Row) -> TokenArray:
    """Return the tokens that the caches of a joined row hold, as the prefix cache compares them."""
    return np.concatenate([row.prompt.identity, np.array(row.answer[:-1], np.int64)])


def find_prefix(
    row: Row, target: Target, head: MtpHead | None, prefix_cache: PrefixCache
) -> Match | None:
    """Return the longest beginning of a row in the prefix cache.

    A row that does not draft may start without the head's part, if that is longer.
    """
    if row.prompt.scope is None or not target.supports_prefix_cache:
        return None
    if head is not None and not head.has_caches:
        head = None
    find = partial(prefix_cache.match, row.prompt.scope, context_of(row))
    match = find(with_head=head is not None, cuttable=target.starts_anywhere and head is None)
    if head is None or row.uses_head:
        return match
    without = find(with_head=False, cuttable=target.starts_anywhere)
    longer = without is not None and (match is None or without.tokens > match.tokens)
    return without if longer else match


def _restore_prefix(prefill: Prefill, target: Target, prefix_cache: PrefixCache) -> None:
    """Start from the longest beginning in the cache; find where to store what is read."""
    row, prompt = prefill.row, prefill.row.prompt
    if prompt.scope is None:
        return
    find = partial(find_prefix, row, target, prefill.head, prefix_cache)
    match = in_memory = find()
    if row.prefetched:
        prefix_cache.insert(prompt.scope, prompt.identity, row.prefetched)
        match = find()
    row.prefetched, row.cacheable = (), True
    if match is not None:
        if prompt.prefix is not None:
            prefix_cache.name(match.nodes, prompt.prefix.tokens, prompt.prefix.key)
        prefix_cache.touch(match.nodes)
        if prefill.head_caches and not all(node.head for node in match.nodes):
            prefill.head, prefill.head_caches = None, []
        match.restore(prefill.caches, prefill.head_caches, len(prefill.tokens) + 1)
        prefill.last_hidden = match.snapshot.last_hidden if match.snapshot else None
        prefill.read_count = match.tokens
        if not row.begun:
            # Of an answer that another worker has begun, some may be cached too.
            row.cached_tokens = min(match.tokens, len(prompt.tokens))
            known = min(in_memory.tokens, row.cached_tokens) if in_memory else 0
            row.cached_kinds = _kinds(row, row.cached_tokens, known)
    prefill.boundaries = _boundaries(
        prefill, cuttable=target.starts_anywhere and not prefill.head_caches
    )


def _kinds(row: Row, tokens: int, in_memory: int) -> dict[str, int]:
    """Return how many tokens of a match are of each kind, given those that were in memory."""
    kinds = Counter({"disk": tokens - in_memory})
    for kind, begin, end in row.loaded:
        kinds[kind] += max(min(end, tokens) - begin, 0)
    known = max(tokens - kinds.total(), 0)
    system = min(row.prompt.prefix.tokens if row.prompt.prefix else 0, known)
    return {**kinds, "system": system, "conversation": known - system}


def _boundaries(prefill: Prefill, *, cuttable: bool) -> list[int]:
    """Return the ends of the system prompt and of messages, and points in long ones.

    Each costs a pass of its own. Therefore ends that are near the one before are none, and neither
    is that of a short last message if the end of the answer will do: a row that changes one of them
    starts from the point before. Where memory is short, the prefix cache thins them further.
    """
    prompt, begin = prefill.row.prompt, prefill.read_count
    system = prompt.prefix.tokens if prompt.prefix else 0
    if cuttable:
        ends = {system, len(prompt.tokens)}
    else:
        points = _checkpoints(prompt, max(system, begin))
        short = prompt.turn_tokens - max(system, begin) < _SHORT_TURN_TOKENS
        ends = {system, *points, *([] if short and prompt.continues else [prompt.turn_tokens])}
    return sorted(end for end in ends if end > begin and end >= MIN_TOKENS)


def _checkpoints(prompt: PreparedPrompt, begin: int) -> list[int]:
    apart = max(_SHORT_TURN_TOKENS, (len(prompt.tokens) - begin) // _MAX_CHECKPOINTS)
    ends = [begin]
    if prompt.closing:
        marks = np.flatnonzero(prompt.identity[: prompt.turn_tokens] == prompt.closing[0])
        for end in (marks + len(prompt.closing)).tolist():
            if end - ends[-1] >= apart:
                ends.append(end)
    others = range(begin, len(prompt.tokens), SNAPSHOT_INTERVAL_TOKENS)
    return [*ends, *(at for at in others if all(abs(at - end) >= apart for end in ends))]


def forward_chunk(prefill: Prefill, target: Target, chunk_tokens: int) -> Exception | None:
    """Read up to `chunk_tokens` more tokens of the prompt, or of a requeued row's answer.

    The caller evaluates the arrays of the prefill. Returns the error of the head if it failed: the
    target then goes on without it.
    """
    row, head_error = prefill.row, None
    begin = prefill.read_count
    end = begin + min(chunk_tokens, prefill.next_tokens)
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
    if row.prompt_logprobs is not None and not row.answer:
        row.prompt_logprobs.read(lambda part: target.scores(output[:, part])[0], end - begin)
    if prefill.head is not None and prefill.head_caches:
        try:
            _prefill_head(prefill, prefill.head, output, begin, end)
        except Exception as error:  # noqa: BLE001  # the target needs no head to go on
            prefill.head, prefill.head_caches, head_error = None, [], error
    prefill.read_count = end
    if target.returns_hidden:
        prefill.last_hidden = output[:, -1:]
    if prefill.complete:
        prefill.scores = target.scores(output, last=1)
    return head_error


def _prefill_head(prefill: Prefill, head: MtpHead, hidden: mx.array, begin: int, end: int) -> None:
    """Let the head read pairs of the hidden state of token i and token i + 1."""
    if prefill.last_hidden is not None:
        hidden = mx.concatenate([prefill.last_hidden, hidden[:, :-1]], axis=1)
        begin -= 1
    else:
        hidden = hidden[:, :-1]
    following = [prefill.tokens[at + 1] for at in prefill.read_indices[begin : end - 1]]
    if following:
        _forward_head(prefill, head, following, hidden, begin)


def seed_head(prefill: Prefill, head: MtpHead, last_token: int) -> mx.array:
    """Let the head read the last token of the answer; return its state [1, 1, width].

    A head without caches begins with the target's own state.
    """
    assert prefill.last_hidden is not None
    if not head.has_caches:
        return prefill.last_hidden
    begin = len(prefill.read_indices) - 1
    return _forward_head(prefill, head, [last_token], prefill.last_hidden, begin)


def _forward_head(
    prefill: Prefill, head: MtpHead, tokens: list[int], hidden: mx.array, begin: int
) -> mx.array:
    """Run the head at the numbers of its slots, as it drafts: skipped tokens leave no gap.

    This costs no acceptance (with true positions the demo model accepted no more drafts).
    """
    positions = mx.arange(begin, begin + len(tokens), dtype=mx.int32)[None]
    ids = mx.array([tokens], dtype=mx.int32)
    return head.forward(ids, hidden, prefill.head_caches, positions)
