"""The lines in a stream that list its tokens, so that another worker can continue if this one dies.

A line has the index of a choice, and what the steps of the engine have added to it since the line
before: `0 12+55/hh 8` is a step whose draft of 2 tokens of the head was accepted up to the first
one, and a plain step. `/hh,2` says how many drafted tokens were accepted where it is not all but
the last token, `/hhh` alone that a draft of 3 tokens failed. `@1764000000` is the time of the
answer in seconds since 1970, and a point its end. Only workers read these lines; a gateway passes
them on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.protocol import ANSWER_FIELD, MORE_LINE, TOKENS_LINE, DraftSource
from workers.engine.types import GivenAnswer, TokenStep
from workers.server.errors import BadRequest

_NUMBER = "[0-9]{1,15}"
_SOURCES = {source.value[0]: source for source in DraftSource}
_DRAFT = rf"/(?P<sources>[{''.join(_SOURCES)}]{{1,4096}})(?:,(?P<accepted>[0-9]{{1,4}}))?"
_STEP = re.compile(rf"(?P<tokens>{_NUMBER}(?:\+{_NUMBER})*)?(?:{_DRAFT})?")
_INDEX = re.compile("[0-9]{1,6}")
_CREATED = re.compile(f"@{_NUMBER}")
_END = "."


class AnswerProgress:
    """The lines of one stream."""

    def __init__(self, created_s: int | None = None) -> None:
        """Write the answer's time first, unless the stream continues that of another worker."""
        self._begin = [] if created_s is None else [f"@{created_s}"]
        self._pending: dict[int, list[str]] = {}
        """The content of the next line of each choice."""

    def add(self, index: int, steps: Sequence[TokenStep], *, ended: bool = False) -> None:
        """Add steps to the next line of a choice, and its end."""
        pending = self._pending.setdefault(index, [])
        pending += map(_spell, steps)
        if ended:
            pending.append(_END)

    def mark(self, events: Sequence[bytes], index: int, *, whole: bool = True) -> list[bytes]:
        """Put lines before events that belong together; the last one has the line of the choice.

        It adds nothing new unless the events are the `whole` text of all tokens so far.
        """
        told = self._pending.pop(index, []) if whole else []
        begin, self._begin = self._begin, []
        line = TOKENS_LINE + " ".join((str(index), *begin, *told)).encode() + b"\n"
        return [*(MORE_LINE + event for event in events[:-1]), line + events[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStream:
    """The part that the client has of a stream that another worker has begun."""

    created_s: int
    answers: tuple[GivenAnswer, ...]
    """Of each choice."""


def read_given(field: object, choices: int) -> GivenStream:
    """Read the lines of a stream; raise `BadRequest` if they are none of `choices` choices."""
    steps: list[list[TokenStep]] = [[] for _ in range(choices)]
    finished = [False] * choices
    created_s = None
    for line in field.split(";") if isinstance(field, str) else [""]:
        index, *words = line.split(" ") if line else ("",)
        if not _INDEX.fullmatch(index) or int(index) >= choices:
            raise _invalid()
        for word in filter(None, words):
            if _CREATED.fullmatch(word):
                created_s = int(word[1:])
            elif finished[int(index)]:
                raise _invalid()
            elif word == _END:
                finished[int(index)] = True
            else:
                steps[int(index)].append(_read(word))
    if created_s is None:
        raise _invalid()
    answers = [
        GivenAnswer(steps=tuple(one), finished=ended)
        for one, ended in zip(steps, finished, strict=True)
    ]
    return GivenStream(created_s=created_s, answers=tuple(answers))


def _spell(step: TokenStep) -> str:
    text = "+".join(map(str, step.tokens))
    if step.sources:
        text += "/" + "".join(source.value[0] for source in step.sources)
        if step.tokens and step.accepted != len(step.tokens) - 1:
            text += f",{step.accepted}"
    return text


def _read(word: str) -> TokenStep:
    found = _STEP.fullmatch(word)
    if found is None:
        raise _invalid()
    tokens = tuple(map(int, found["tokens"].split("+"))) if found["tokens"] else ()
    sources = tuple(_SOURCES[letter] for letter in found["sources"] or "")
    accepted = int(found["accepted"]) if found["accepted"] else max(len(tokens) - 1, 0)
    if accepted > min(len(sources), len(tokens)):
        raise _invalid()
    return TokenStep(tokens, sources, accepted)


def _invalid() -> BadRequest:
    return BadRequest(f"'{ANSWER_FIELD}' is not what a worker has told.", param=ANSWER_FIELD)
