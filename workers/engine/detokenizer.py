"""Turn tokens into text as they come: whole characters only, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a tokenizer writes for the bytes of a character that is not complete yet."""


class TextStream:
    """The text of one growing token sequence.

    `push` returns the characters that are sure to stand in the answer: a character whose bytes
    are still coming, and an ending that may grow into a stop string, are held back. The decoding
    window of two cursors is vLLM's (detokenize_incrementally).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._shown = 0
        self._read = 0
        self._held = ""
        self.decided_chars = 0
        """How many are sure to come out of the tokens so far, stop strings and all."""
        self.stopped = False
        """True once a stop string has been completed; nothing may be pushed after it."""

    def push(self, token: int) -> str:
        """Add one token; return the text it made certain."""
        self._tokens.append(token)
        return self._settle(self._newly_decoded(final=False))

    def flush(self) -> str:
        """End the sequence; return what was still held back."""
        if self.stopped:
            return ""
        text = self._settle(self._newly_decoded(final=True))
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _newly_decoded(self, *, final: bool) -> str:
        known = self._decode(self._tokens[self._shown : self._read])
        text = self._decode(self._tokens[self._shown :])
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and not final):
            return ""
        self._shown, self._read = self._read, len(self._tokens)
        self.decided_chars += len(text) - len(known)
        return text[len(known) :]

    def _settle(self, text: str) -> str:
        self._held += text
        if not self._stop:
            text, self._held = self._held, ""
            return text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
