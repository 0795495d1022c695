"""Parts of a checkpoint that raise in chosen calls."""

from collections.abc import Callable
from typing import Any


class FailingPart:
    """A part of a checkpoint that raises in the calls that `when` selects by method and number."""

    def __init__(self, part: Any, when: Callable[[str, int], bool]) -> None:
        self._part = part
        self._when = when
        self._calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._part, name)
        if name not in ("forward", "draft"):
            return attribute

        def call(*arguments: Any, **keywords: Any) -> Any:
            number = self._calls[name] = self._calls.get(name, 0) + 1
            if self._when(name, number):
                raise RuntimeError(f"{name} number {number}")
            return attribute(*arguments, **keywords)

        return call
