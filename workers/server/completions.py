"""`text_completion`, whole and in chunks, exactly in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.types import Delta, Finished, TokenLogprob
from workers.server.choices import json_logprob
from workers.server.ports import Json


class CompletionChoice:
    """One choice of a text completion."""

    def __init__(self, index: int, *, echo: str, top_logprobs: int | None) -> None:
        self._index = index
        self._echo = echo
        self._top_logprobs = top_logprobs
        self._waiting: list[TokenLogprob] = []
        self._all: list[TokenLogprob] = []
        self._text = ""
        self._finish_reason = ""

    def opening(self) -> Sequence[Json]:
        """Repeat the prompt where that was asked for."""
        return (self._entry(self._echo),) if self._echo else ()

    def more(self, delta: Delta) -> Sequence[Json]:
        """Write the text that was decided."""
        self._waiting += delta.logprobs
        if not delta.text:
            return ()
        self._text += delta.text
        return (self._entry(delta.text),)

    def end(self, finished: Finished) -> Sequence[Json]:
        """Write the reason of the end."""
        self._finish_reason = finished.reason.value
        return (self._entry("", self._finish_reason),)

    def whole(self) -> Json:
        """Return the whole text."""
        return {
            "index": self._index,
            "text": self._echo + self._text,
            "logprobs": self._as_logprobs(self._all),
            "finish_reason": self._finish_reason,
        }

    def _entry(self, text: str, finish_reason: str | None = None) -> Json:
        carried, self._waiting = self._waiting, []
        logprobs = self._as_logprobs(carried) if carried else None
        self._all += carried
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _as_logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        if self._top_logprobs is None:
            return None
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [json_logprob(token.logprob) for token in tokens],
            "top_logprobs": [
                {one.text: json_logprob(one.logprob) for one in token.top} for token in tokens
            ]
            if self._top_logprobs
            else None,
            "text_offset": [len(self._echo) + token.offset_chars for token in tokens],
        }
