"""Batch of decoding rows and their caches; rows join and leave between any two steps.

While the MTP head of a batch drafts nothing, the hidden states that it would read collect in a
backlog: plain steps and those of prompt lookup then cost what they cost without a head, and the
head drafts again after one pass over the backlog.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import mlx.core as mx
import numpy as np

from paceline.protocol import DraftSource
from workers.engine.decode.draft_length import Plan
from workers.engine.decode.prompt_lookup import Found
from workers.engine.decode.row import Row
from workers.engine.decode.step_graph import Layers, State
from workers.engine.model.draft_shortlist import DraftShortlist
from workers.engine.model.kv_cache import KVCache, LayerCache, RowCache, capacity
from workers.engine.model.mtp_head import MtpHead
from workers.engine.model.windows import FamilyWindow, to_ring

SIZE_CLASSES = (4096, 16384)
"""Slots at which the next class of rows begins."""


def size_class(slots: int) -> int:
    """Return the class of a row: rows of one class share a batch.

    A batch holds, and a pass attends to, each of its rows at the length of the longest. Beside a
    document, a short chat would take the memory of one; apart it costs a pass more.
    """
    return sum(slots > limit for limit in SIZE_CLASSES)


class Unread(NamedTuple):
    """Tokens of one step that the head has not read."""

    tokens: mx.array
    """[rows, L]."""
    hidden: mx.array
    """[rows, L, width]."""
    counts: Sequence[int] = ()
    """Of each row, how many of its tokens are of the answer."""


class Drafts(NamedTuple):
    """The drafts of one step of a batch, and the runs that prompt lookup found for it."""

    plan: Plan
    runs: Sequence[Sequence[int]] = ()
    """For each row the tokens of its run that it drafts; empty for the head, or nothing."""
    found: Sequence[Found | None] = ()
    representative: bool = True
    """Whether the duration of the step counts as the cost of this plan."""

    def limits(self, rows: Sequence[Row]) -> list[int]:
        """Return how many tokens each row drafts, of its run or of the head."""
        runs, head_tokens = self.runs or [()] * len(rows), self.plan.head_tokens
        return [
            len(run) or (row.draft_limit(head_tokens) if row.uses_head else 0)
            for row, run in zip(rows, runs, strict=True)
        ]

    def select(self, indices: Sequence[int]) -> Self:
        """Return only the drafts of these rows."""
        return self._replace(
            runs=[self.runs[at] for at in indices if self.runs],
            found=[self.found[at] for at in indices if self.found],
        )


@dataclass(slots=True, kw_only=True, eq=False)
class OpenStep:
    """A step that has begun; its arrays may still be computed."""

    planned: Drafts
    drafts: mx.array
    """[rows, L - 1]."""
    limits: Sequence[int]
    """Tokens that each row drafts."""
    head_length: int
    """Tokens that the head drafts."""
    sources: Sequence[tuple[DraftSource, ...]]
    """Where each draft token comes from."""
    scores: mx.array
    """[rows, L, vocabulary], also for log-probabilities."""
    hidden: mx.array | None
    """[rows, L, width]: the hidden states of the tokens that the step reads."""
    recurrent: Layers
    """States of the recurrent layers after the step, or their histories where L > 1."""

    @classmethod
    def plain(cls, scores: mx.array, rows: int) -> Self:
        """Return a step that drafts nothing and has only scores."""
        return cls(
            planned=Drafts(Plan(0)), head_length=0, scores=scores, hidden=None, recurrent=[],
            drafts=mx.zeros((rows, 0), mx.int32), limits=[0] * rows, sources=[()] * rows,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Return how many tokens the step verifies: no row gets more."""
        return self.scores.shape[1]

    def select(self, indices: Sequence[int]) -> Self:
        """Return the step without all rows but these."""
        rows = mx.array(indices, dtype=mx.int32)
        return replace(
            self,
            planned=self.planned.select(indices),
            drafts=self.drafts[rows],
            limits=[self.limits[index] for index in indices],
            sources=[self.sources[index] for index in indices],
            scores=self.scores[rows],
            hidden=None if self.hidden is None else self.hidden[rows],
            recurrent=[
                [tuple(part[rows] for part in slot) for slot in layer]
                if isinstance(layer, list)
                else tuple(slot[rows] for slot in layer)
                for layer in self.recurrent
            ],
        )


class Batch:
    """Decoding rows and, row by row, their caches, the head's caches and the last chosen token.

    Between steps the target's caches hold exactly prompt + answer[:-1], and those of an open step
    more keys and values behind their cursors. The head's caches hold the same less the backlog;
    while there is no backlog, `seed_hidden` is the head's state that drafts the first token after
    the answer.
    """

    def __init__(self, *, shared: bool) -> None:
        """Create an empty batch; a batch that is not shared holds at most one row."""
        self.shared = shared
        """Whether it holds its rows' caches as a batch does, so that a step graph takes them."""
        self.clear()

    def clear(self) -> None:
        """Remove all rows and free their memory."""
        self.rows: list[Row] = []
        self.caches: list[LayerCache] = []
        self.head_caches: list[LayerCache] = []
        """Empty in a batch that never drafts, or whose head has none."""
        self.last_tokens: mx.array = mx.zeros((0,), dtype=mx.int32)
        """[rows]: the last token of every answer, in no cache yet."""
        self.position_shift: mx.array = self.last_tokens
        """[rows]: difference from the slot of a token to its position."""
        self.seed_hidden: mx.array | None = None
        """[rows, 1, width]; None in a batch that never drafts."""
        self.backlog: list[Unread] = []
        """Tokens and hidden states that the head has not read, step by step."""
        self.opened: OpenStep | None = None
        """The next step, if it has begun."""
        self._further: mx.array | None = None

    @property
    def has_head(self) -> bool:
        """Return whether the MTP head may draft for the rows."""
        return self.seed_hidden is not None

    @property
    def offset(self) -> mx.array:
        """Return the cursors [rows] of the target's caches."""
        return next(cache.offset for cache in self.caches if isinstance(cache, RowCache))

    def set_offset(self, offset: mx.array) -> None:
        """Move the cursors of all caches, the head's too."""
        for cache in self._row_caches():
            cache.offset = offset

    def reserve(self, tokens: int) -> None:
        """Reserve slots for `tokens` more tokens in every row."""
        needed = max(row.slots_used for row in self.rows) + tokens
        for cache in self._row_caches():
            cache.reserve(needed)

    def read_backlog(self, head: MtpHead, unread_tokens: int = 0) -> None:
        """Let the head read its backlog in one pass.

        Rows may have up to `unread_tokens` tokens more than their answers say.
        """
        if not self.backlog:
            return
        tokens = mx.concatenate([step.tokens for step in self.backlog], axis=1)
        hidden = mx.concatenate([step.hidden for step in self.backlog], axis=1)
        kept, totals = _kept_tokens(self.backlog)
        length, end = kept.shape[1], self.offset
        start = end - mx.array(totals)
        # A row that has kept fewer tokens than another one writes more behind its cursor.
        used = [row.slots_used - total for row, total in zip(self.rows, totals, strict=True)]
        for cache in self.head_caches:
            cache.reserve(max(used) + length + unread_tokens)
            cache.offset = start
        state = head.forward(
            mx.take_along_axis(tokens, kept, axis=1),
            mx.take_along_axis(hidden, kept[:, :, None], axis=1),
            self.head_caches,
            start[:, None] + mx.arange(length, dtype=mx.int32),
        )
        for cache in self.head_caches:
            cache.offset = end
        self.seed_hidden = mx.take_along_axis(state, (end - start - 1)[:, None, None], axis=1)
        self.backlog.clear()

    def further_tokens(self, shortlist: DraftShortlist | None) -> mx.array:
        """Return the tokens [rows, n] that the head drafts in addition to its shortlist.

        None where it drafts over the whole vocabulary, because a row has too many other tokens.
        """
        for row in self.rows:
            if shortlist is not None and not row.further_tokens:
                row.further_tokens = shortlist.further(row.prompt.tokens)
        if shortlist is None or not all(
            shortlist.covers(row.prompt.tokens, row.answer, row.further_tokens) for row in self.rows
        ):
            return mx.zeros((len(self.rows), 0), dtype=mx.int32)
        if self._further is None:
            self._further = mx.array([row.further_tokens for row in self.rows], dtype=mx.int32)
        return self._further

    def join(
        self,
        row: Row,
        caches: Sequence[LayerCache],
        head_caches: Sequence[KVCache],
        last_token: int,
        seed_hidden: mx.array | None,
    ) -> None:
        """Add a row after its prefill; the batch takes over its caches, and no step may be open."""
        assert self.opened is None, "the row has no part in it"
        new_caches = [row_cache(cache) if self.shared else cache for cache in caches]
        new_head_caches = [row_cache(cache) for cache in head_caches]
        token = mx.array([last_token], dtype=mx.int32)
        shift = mx.array([row.skipped_tokens + row.position_offset], dtype=mx.int32)
        if not self.rows:
            self.caches, self.head_caches = new_caches, new_head_caches
            self.last_tokens, self.position_shift, self.seed_hidden = token, shift, seed_hidden
        else:
            joined = (*self.caches, *self.head_caches)
            for cache, new in zip(joined, (*new_caches, *new_head_caches), strict=True):
                cache.extend(new)
            self.last_tokens = mx.concatenate([self.last_tokens, token])
            self.position_shift = mx.concatenate([self.position_shift, shift])
            if self.seed_hidden is not None and seed_hidden is not None:
                self.seed_hidden = mx.concatenate([self.seed_hidden, seed_hidden])
        self.rows.append(row)
        self._further = None
        self.evaluate()

    def select(self, indices: Sequence[int]) -> None:
        """Drop all rows but these."""
        if len(indices) == len(self.rows):
            return
        if not indices:
            self.clear()
            return
        chosen = mx.array(indices, dtype=mx.int32)
        self.rows = [self.rows[index] for index in indices]
        self._further = None
        longest = max(row.slots_used for row in self.rows)
        if self.opened is not None:
            self.opened = self.opened.select(indices)
            longest += self.opened.tokens
        for cache in (*self.caches, *self.head_caches):
            cache.filter(chosen)
        for cache in self._row_caches():
            cache.shrink(longest)
        self.last_tokens = self.last_tokens[chosen]
        self.position_shift = self.position_shift[chosen]
        if self.seed_hidden is not None:
            self.seed_hidden = self.seed_hidden[chosen]
        self.backlog = [
            Unread(step.tokens[chosen], step.hidden[chosen], [step.counts[at] for at in indices])
            for step in self.backlog
        ]

    def evaluate(self) -> None:
        """Compute the caches layer by layer, so that no copy outlives its layer."""
        for cache in (*self.caches, *self.head_caches):
            mx.eval(cache.state)

    def evaluate_async(self) -> None:
        """Start computing all inputs of the next step on the device, without waiting."""
        mx.async_eval(
            self.last_tokens, self.seed_hidden, [step[:2] for step in self.backlog],
            [cache.state for cache in self.caches], [cache.state for cache in self.head_caches],
            [cache.offset for cache in self._row_caches()],
        )  # fmt: skip

    def _row_caches(self) -> Iterator[RowCache]:
        for cache in (*self.caches, *self.head_caches):
            if isinstance(cache, RowCache):
                yield cache


def _kept_tokens(backlog: Sequence[Unread]) -> tuple[mx.array, list[int]]:
    """Return the places [rows, tokens] of the tokens of the answers, and how many each row has.

    Where a row has fewer than another one, its last place stands again.
    """
    counts = np.array([step.counts for step in backlog])
    begins = np.cumsum([0, *(step.tokens.shape[1] for step in backlog[:-1])])
    totals = counts.sum(axis=0)
    places = np.zeros((len(totals), totals.max()), np.int32)
    for row, total in enumerate(totals):
        kept = [
            begin + np.arange(count) for begin, count in zip(begins, counts[:, row], strict=True)
        ]
        places[row, :total] = np.concatenate(kept)
        places[row, total:] = places[row, total - 1]
    return mx.array(places), totals.tolist()


def row_cache(cache: LayerCache) -> LayerCache:
    """Return the cache of one row as a batch holds it, with room for one more token."""
    if isinstance(cache, FamilyWindow):
        return to_ring(cache, 1)
    if not isinstance(cache, KVCache):
        return cache
    row = RowCache(cache.keys, cache.values, mx.array([cache.offset], dtype=mx.int32))
    row.resize(capacity(cache.offset + 1))
    return row


def states_of(caches: Sequence[LayerCache]) -> State:
    """Return the arrays of caches, layer by layer."""
    return [tuple(cache.state) for cache in caches]


def set_states(caches: Sequence[LayerCache], states: State) -> None:
    """Replace the arrays of caches, which copy before they write."""
    for cache, arrays in zip(caches, states, strict=True):
        cache.state = list(arrays)
