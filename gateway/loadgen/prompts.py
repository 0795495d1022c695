"""What is asked: questions that come with this package, or a file of the user's own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from gateway.loadgen import MeasurementError

_ABOUT: Final = ("the sea", "the forest", "the city", "the desert", "the moon", "winter", "summer")
_HEROES: Final = ("fox", "cat", "dog", "robot", "dragon", "owl", "bear", "frog", "mouse", "bird")
_DISHES: Final = ("pancakes", "soup", "apple cake", "bread", "fruit salad")
_GROUPS: Final = ("fruits", "animals", "colours", "planets", "cities")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered."""

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None = None
    """None: as many as the measurement allows all of them."""


def built_in_prompts() -> tuple[Prompt, ...]:
    """List questions whose answers range from wholly foreseeable to free.

    How well drafts are accepted hangs on the text more than on anything else, so the mixture is
    fixed: a third counts and multiplies, a third lists and explains, a third tells stories.
    """
    foreseeable = (
        *(f"Count from {first} to {first + 39}." for first in range(1, 60, 3)),
        *(f"Write the multiplication table of {factor} up to 10." for factor in range(2, 11)),
    )
    explaining = (
        *(f"Describe {topic} in detail." for topic in _ABOUT),
        *(f"Give me a recipe for {dish}." for dish in _DISHES),
        *(f"Give me a JSON list of five {group}." for group in _GROUPS),
        *(f"Write a long text about {topic}." for topic in _ABOUT),
        *("Write a diary for a week.", "Write a diary for two weeks."),
    )
    free = (
        *(f"Tell me a long story about a {hero}." for hero in _HEROES),
        *(f"Write me a story about a {hero}." for hero in _HEROES),
        *(f"Write a poem about {topic}." for topic in _ABOUT),
    )
    kinds = (foreseeable, explaining, free)
    return tuple(
        Prompt(({"role": "user", "content": kind[place % len(kind)]},))
        for place in range(max(len(kind) for kind in kinds))
        for kind in kinds
    )


def read_prompts(file: Path) -> tuple[Prompt, ...]:
    """Read a prompt from each line: `{"prompt": "..."}` or `{"messages": [...]}`.

    Beside it a line may hold `max_tokens`. A line that says anything else is named and refused.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{file} cannot be read: {error}") from None
    found = tuple(
        _read_line(f"{file}:{number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not found:
        raise MeasurementError(f"{file} holds no prompt.")
    return found


def draw_prompts(prompts: Sequence[Prompt], count: int, random: Random) -> list[Prompt]:
    """Draw so many prompts, none a second time before all others were drawn."""
    endless = itertools.chain.from_iterable(
        random.sample(prompts, len(prompts)) for _ in itertools.count()
    )
    return list(itertools.islice(endless, count))


def _read_line(where: str, line: str) -> Prompt:
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise MeasurementError(f"{where}: not a JSON object.")
    match told.pop("prompt", None), told.pop("messages", None):
        case str(text), None:
            messages = [{"role": "user", "content": text}]
        case None, [_, *_] as messages if all(isinstance(entry, dict) for entry in messages):
            pass
        case _:
            raise MeasurementError(f"{where}: must hold a 'prompt' (text) or 'messages' (a list).")
    max_tokens = told.pop("max_tokens", None)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise MeasurementError(f"{where}: 'max_tokens' must be a whole number above 0.")
    if told:
        raise MeasurementError(f"{where}: nothing is known of '{next(iter(told))}'.")
    return Prompt(tuple(messages), max_tokens)
