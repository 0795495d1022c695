"""Long texts: read one at a time, and no further than the model could.

A tokenizer takes a hundred bytes for each character, in C, where nothing stops it. So a text that
may be far too long is first tokenized in pieces, up to where it has more tokens than are wanted.
A bound on its characters would not suffice: the longest token of a usual vocabulary has 128, so
that the context of a large model holds any body; and normalisers drop or join characters, and runs
of spaces or of unknown characters may be one token.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")

PIECE_CHARS = 1 << 15
_LONG_CHARS = 1 << 18
_CHARS_A_TOKEN = 8
"""A text with fewer of them takes little memory, even if it is too long: nearly all prompts."""
_SEAM_TOKENS = 128
"""More than a cut adds: a word of a hundred letters may be one unknown token, and no half of it."""
# One thread: whoever waits may leave.
_LONG = ThreadPoolExecutor(1, "long-text")


class Beyond(NamedTuple):
    """The beginning or the end of a text, and the tokens that it has at least."""

    chars: int
    tokens: int


async def in_turn(chars: int, work: Callable[[], Result]) -> Result:
    """Run work on texts in a thread; long ones wait for each other, and not if cancelled."""
    executor = _LONG if chars > _LONG_CHARS else None
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def chars_beyond(
    text: str, limit: int, count: Callable[[str], int], *, from_end: bool = False
) -> Beyond | None:
    """Return a part of a text that has more than `limit` tokens; `count` tokenizes a piece.

    None if the text may have fewer, or is too short to matter.
    """
    if len(text) <= max(limit * _CHARS_A_TOKEN, PIECE_CHARS):
        return None
    tokens = 0
    for chars in range(PIECE_CHARS, len(text), PIECE_CHARS):
        begin = len(text) - chars if from_end else chars - PIECE_CHARS
        tokens += max(count(text[begin : begin + PIECE_CHARS]) - _SEAM_TOKENS, 0)
        if tokens > limit:
            return Beyond(chars, tokens)
    return None
