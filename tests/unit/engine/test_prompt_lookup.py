"""Prompt lookup: what it drafts, and how it learns when its drafts are accepted."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from workers.engine.decode.prompt_lookup import (
    MAX_TEXT_TOKENS,
    NGRAM_TOKENS,
    Found,
    PromptLookup,
    Reliability,
)


def lookup(*texts: Sequence[int], answer: Sequence[int] = ()) -> PromptLookup:
    """Index texts, the last of which is the prompt, and an answer."""
    index = PromptLookup([np.array(text, np.int64) for text in texts])
    index.extend(answer)
    return index


@pytest.mark.parametrize(
    ("texts", "answer", "tokens", "found"),
    [
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [2, 3, 4], 4, Found([5, 6, 7, 8], 3)),
        # The answer follows the prompt.
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [2, 3, 4, 5, 6], 4, Found([7, 8, 9, 2], 5)),
        ([[1, 2, 3, 4, 5, 6, 7, 8, 9]], [2, 3, 4, 5, 6, 1], 4, None),
        # The longest match wins over a later one.
        ([[1, 2, 3, 4, 50, 9, 2, 3, 4, 60]], [1, 2, 3, 4], 1, Found([50], 4)),
        ([[2, 3, 4, 50, 9, 2, 3, 4, 60]], [2, 3, 4], 1, Found([60], 3)),
        # A period is continued beyond the end.
        ([[]], [7, 8, 9, 7, 8, 9], 5, Found([7, 8, 9, 7, 8], 3)),
        # Other texts are drafted from, and do not run into each other.
        ([[1, 2, 3, 4, 5], [10, 11, 12]], [1, 2, 3], 8, Found([4, 5], 3)),
        ([[1, 2], [3, 4, 5]], [1, 2, 3], 8, None),
        # A picture is never drafted.
        ([[1, 2, 3, -(1 << 60), -5, 4, 5, 6, -7, 8]], [1, 2, 3], 4, None),
        ([[1, 2, 3, 4, -5, 6]], [1, 2, 3], 4, Found([4], 3)),
        # Short texts have no drafts.
        ([[]], [], 4, None),
        ([[1, 2]], [1], 4, None),
        ([[1, 2, 3, 1, 2, 3]], [], 0, None),
    ],
)
def test_what_followed_the_longest_match_is_drafted(texts, answer, tokens, found) -> None:
    assert lookup(*texts, answer=answer).find(tokens) == found


def test_a_long_prompt_is_indexed_from_its_end() -> None:
    index = lookup([*range(MAX_TEXT_TOKENS + 10)], answer=[0, 1, 2])
    assert index.find(1) is None
    last = [*range(MAX_TEXT_TOKENS + 4, MAX_TEXT_TOKENS + 7)]
    index.extend(last)
    assert index.find(2) == Found([last[-1] + 1, last[-1] + 2], NGRAM_TOKENS)


@pytest.mark.parametrize("seed", range(20))
def test_every_draft_is_what_followed_the_match(seed: int) -> None:
    """Compared with a search of the whole text, after each token of a random one."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3) for _ in range(rng.randrange(40))]
    index, text = lookup(prompt), list(prompt)
    for _ in range(60):
        found = index.find(3)
        occurs = any(
            text[at - NGRAM_TOKENS : at] == text[-NGRAM_TOKENS:]
            for at in range(NGRAM_TOKENS, len(text))
        )
        assert (found is not None) == occurs
        if found is not None:
            end = [*text[-min(found.match_tokens, len(text)) :], *found.tokens]
            whole = [*text, *found.tokens]
            begins = [at for at in range(len(text)) if whole[at : at + len(end)] == end]
            assert len(begins) > 1, "the match and its continuation occur before"
        token = rng.randrange(3) if found is None or rng.random() < 0.5 else found.tokens[0]
        index.extend([token])
        text.append(token)
    assert index.answer_tokens == 60


def test_lookups_of_a_row_that_are_wrong_lose_their_reliability_and_regain_it() -> None:
    """Also tokens that were looked up and not drafted count."""
    lane, row, other = Reliability(), PromptLookup([]).counts, PromptLookup([]).counts
    found = Found([1, 2, 3, 4], 4)
    before = lane.of(found, row)
    for _ in range(8):
        lane.observe(found, [9], row)
    worse = lane.of(found, row)
    assert worse < lane.of(found, other) < before
    for _ in range(12):
        lane.observe(found, [1, 2, 3, 4, 5], row)
    assert lane.of(found, row) > 0.8
    assert lane.of(Found([1], 30), row) > 0.9, "a longer match is another class"
