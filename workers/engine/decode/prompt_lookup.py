"""Prompt lookup: draft the tokens that followed an earlier occurrence of an answer's last tokens.

Agents write files again, answers quote their prompt, and retries repeat earlier answers: their text
is drafted without a model (Saxena 2023, "Prompt Lookup Decoding"; LLMA, Yang et al. 2023, arXiv
2304.04487). An index maps each run of `NGRAM_TOKENS` tokens to its occurrences in the texts, the
latest first: other conversations of the same isolation scope, the prompt, and the answer so far.
The occurrence that agrees with the answer for the most tokens is continued.

The texts before the answer are indexed at once by numpy; a token of the answer takes constant time
and about a hundred bytes. A lookup compares at most `MAX_CANDIDATES` occurrences; while the answer
follows the one that it drafted from, it compares none.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NGRAM_TOKENS = 3
"""Fewer tokens occur again by chance."""
MAX_TEXT_TOKENS = 1 << 17
"""Tokens before the answer that are indexed, the last ones, in 32 bytes each."""
MAX_CANDIDATES = 16
MAX_MATCH_TOKENS = 32
"""Occurrences that agree for this many tokens are equally good; the latest one wins."""
SHARE_CLASSES = (3, 5, 8, 16)
"""Lengths of a match after which the next class of its reliability begins."""
_DECAY = 0.98
_ROW_DECAY = 0.9
_LANE_WEIGHT = 3.0
"""Tokens of a row that weigh as much as the measurements of its lane."""
_FIRST_SHARES = (0.4, 0.6, 0.75, 0.85, 0.95)
_APART = -1
"""Between two texts, and in place of a picture: no token."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BITS = (1 << 64) - 1


class Found(NamedTuple):
    """Tokens that followed an earlier occurrence of the end of an answer."""

    tokens: Sequence[int]
    match_tokens: int
    """Tokens before them that agree."""


class PromptLookup:
    """The index of one row; used by the engine thread only."""

    def __init__(self, texts: Sequence[npt.NDArray[np.int64]]) -> None:
        """Index texts; the last is the prompt, and negative numbers are not tokens."""
        parts: list[npt.NDArray[np.int64]] = []
        for text in texts:
            parts += [text, np.array([_APART], np.int64)]
        joined = np.concatenate(parts[:-1] or [np.zeros(0, np.int64)])[-MAX_TEXT_TOKENS:]
        joined = np.maximum(joined, _APART)
        self._text = array("q", joined.tobytes())
        self._prompt_end = len(joined)
        self._keys, self._ends, previous = _index(joined)
        self._previous = array("q", previous.tobytes())
        """For each place the place before it that follows the same n-gram; -1 for none."""
        self._answer_ends: dict[int, int] = {}
        """The last place after each n-gram that ends in the answer."""
        self._at = -1
        """The place whose tokens the answer has followed; -1 for none."""
        self._match_tokens = 0
        self.counts = [(0.0, 0.0)] * (len(SHARE_CLASSES) + 1)
        """Looked-up tokens by the class of their match: right ones, and compared ones."""

    @property
    def answer_tokens(self) -> int:
        """Return the number of tokens of the answer that are indexed."""
        return len(self._text) - self._prompt_end

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the answer."""
        for token in tokens:
            if self._at >= 0:
                follows = self._text[self._at] == token
                self._at = self._at + 1 if follows else -1
                self._match_tokens += follows
            self._text.append(token)
            end = len(self._text)
            if end < NGRAM_TOKENS:
                self._previous.append(-1)
                continue
            key = _key(self._text[end - NGRAM_TOKENS :])
            self._previous.append(self._last_end(key))
            self._answer_ends[key] = end

    def find(self, limit: int) -> Found | None:
        """Return up to `limit` tokens that followed the longest earlier match of the end."""
        if self._at < 0:
            self._search()
        if self._at < 0 or limit <= 0:
            return None
        end, text = len(self._text), self._text
        tokens: list[int] = []
        for at in range(self._at, self._at + limit):
            # What follows the end of the answer is the draft itself: it repeats a period.
            token = text[at] if at < end else tokens[at - end]
            if token < 0:
                break
            tokens.append(token)
        return Found(tokens, self._match_tokens) if tokens else None

    def _search(self) -> None:
        text, end = self._text, len(self._text)
        candidate, best = self._previous[end], 0
        for _ in range(MAX_CANDIDATES):
            if candidate < 0:
                break
            length, most = 0, min(candidate, MAX_MATCH_TOKENS)
            while length < most and text[candidate - 1 - length] == text[end - 1 - length] >= 0:
                length += 1
            if length > best and length >= NGRAM_TOKENS:
                self._at, best = candidate, length
            if best == MAX_MATCH_TOKENS:
                break
            candidate = self._previous[candidate]
        self._match_tokens = best

    def _last_end(self, key: int) -> int:
        """Return the last place after an n-gram; -1 for none."""
        if key in self._answer_ends:
            return self._answer_ends[key]
        at = int(np.searchsorted(self._keys, np.uint64(key)))
        return int(self._ends[at]) if at < len(self._keys) and self._keys[at] == key else -1


class Reliability:
    """Share of looked-up tokens that the target chose, by the length of the match."""

    def __init__(self) -> None:
        self._shares = list(_FIRST_SHARES)

    def of(self, found: Found, counts: Sequence[tuple[float, float]]) -> float:
        """Return the probability that each of the tokens is accepted if all before it were.

        `counts` are those of the row.
        """
        number = _class_of(found.match_tokens)
        hits, seen = counts[number]
        return (_LANE_WEIGHT * self._shares[number] + hits) / (_LANE_WEIGHT + seen)

    def observe(
        self, found: Found, tokens: Sequence[int], counts: list[tuple[float, float]]
    ) -> None:
        """Compare looked-up tokens, whether drafted or not, with the generated ones."""
        number, hits = _class_of(found.match_tokens), 0
        most = min(len(found.tokens), len(tokens))
        while hits < most and found.tokens[hits] == tokens[hits]:
            hits += 1
        seen = min(hits + 1, most)
        for at in range(seen):
            self._shares[number] = _DECAY * self._shares[number] + (1 - _DECAY) * (at < hits)
        row_hits, row_seen = counts[number]
        counts[number] = _ROW_DECAY * row_hits + hits, _ROW_DECAY * row_seen + seen


def _class_of(match_tokens: int) -> int:
    return sum(match_tokens > limit for limit in SHARE_CLASSES)


def _key(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = (key * int(_FACTOR) + token) & _BITS
    return key


def _index(
    text: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the sorted keys of all n-grams, the last place after each, and earlier places.

    These are, for each place, the place before it that follows the same n-gram.
    """
    previous = np.full(len(text) + 1, -1, np.int64)
    count = len(text) - NGRAM_TOKENS + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64), previous
    tokens = text.astype(np.uint64)
    keys = np.zeros(count, np.uint64)
    for at in range(NGRAM_TOKENS):
        keys = keys * _FACTOR + tokens[at : at + count]
    order = np.argsort(keys, kind="stable")
    ordered, ends = keys[order], order + NGRAM_TOKENS
    same = ordered[1:] == ordered[:-1]
    previous[ends[1:][same]] = ends[:-1][same]
    last = np.append(~same, True)
    return ordered[last], ends[last], previous
