"""Parts of a checkpoint that raise when a test wants it, and what must be right all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.reference_decoder import is_near_tie, reference_greedy
from workers.engine.model import Checkpoint


class FailingPart:
    """A part of a checkpoint that raises in the calls that `when` names by method and number."""

    def __init__(self, part: Any, when: Callable[[str, int], bool]) -> None:
        self._part = part
        self._when = when
        self._calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        got = getattr(self._part, name)
        if name not in ("forward", "draft"):
            return got

        def call(*arguments: Any, **named: Any) -> Any:
            number = self._calls[name] = self._calls.get(name, 0) + 1
            if self._when(name, number):
                raise RuntimeError(f"{name} number {number}")
            return got(*arguments, **named)

        return call


def assert_matches_reference(checkpoint: Checkpoint, one: Any) -> None:
    """Hold the answer of a row against that of its prompt alone."""
    prompt, answer = one.row.prompt.tokens, one.row.answer
    alone = reference_greedy(checkpoint, prompt, one.row.max_tokens)
    assert answer == alone or is_near_tie(checkpoint, prompt, answer, alone)
