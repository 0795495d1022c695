"""Incremental detokenizer: whole characters only, and nothing of a stop string."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""A tokenizer's output for the bytes of an incomplete character."""
# A character has at most four bytes; more tokens without a whole one are no character.
_CHARACTER_TOKENS = 8


class TextStream:
    """Text of one growing token sequence.

    `push` returns only characters that certainly belong to the answer: it holds back an incomplete
    character, and an ending that may become a stop string. The decoding window of two offsets is
    vLLM's (detokenize_incrementally).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str] = (),
        *,
        strip: bool = False,
    ) -> None:
        """Create an empty text; with `strip`, it leaves out white space at its beginning."""
        self._decode = decode
        self._stop = tuple(stop)
        self._strip = strip
        self._tokens: list[int] = []
        self._prefix_offset = 0
        self._read_offset = 0
        self._pending = ""
        self.decided_chars = 0
        """Number of complete characters in the tokens so far, stop strings included."""
        self.stopped_by: str | None = None
        """The stop string that is complete; nothing may be pushed after it."""

    def push(self, token: int) -> str:
        """Append one token; return the new text."""
        self._tokens.append(token)
        return self._release(self._newly_decoded(final=False))

    def flush(self) -> str:
        """End the sequence; return the text held back."""
        if self.stopped_by is not None:
            return ""
        text = self._release(self._newly_decoded(final=True))
        pending, self._pending = self._pending, ""  # nothing where a stop string has come
        return text + pending

    def _newly_decoded(self, *, final: bool) -> str:
        previous = self._decode(self._tokens[self._prefix_offset : self._read_offset])
        text = self._decode(self._tokens[self._prefix_offset :])
        if len(text) <= len(previous):
            return ""
        delayed = len(self._tokens) - self._read_offset
        if text.endswith(REPLACEMENT) and not final and delayed < _CHARACTER_TOKENS:
            return ""
        self._prefix_offset, self._read_offset = self._read_offset, len(self._tokens)
        text = text[len(previous) :]
        if self._strip:
            text = text.lstrip()
            self._strip = not text
        self.decided_chars += len(text)
        return text

    def _release(self, text: str) -> str:
        self._pending += text
        found = [(self._pending.find(stop), stop) for stop in self._stop]
        if matches := [match for match in found if match[0] >= 0]:
            begin, self.stopped_by = min(matches)
            text, self._pending = self._pending[:begin], ""
            return text
        held_chars = max((overlap(self._pending, stop) for stop in self._stop), default=0)
        end = len(self._pending) - held_chars
        text, self._pending = self._pending[:end], self._pending[end:]
        return text


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may begin `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
