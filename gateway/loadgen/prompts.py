"""Prompts of a benchmark: a built-in set, or a file of the user."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from gateway.loadgen import MeasurementError, json_object

_ABOUT: Final = ("the sea", "the forest", "the city", "the desert", "the moon", "winter", "summer")
_HEROES: Final = ("fox", "cat", "dog", "robot", "dragon", "owl", "bear", "frog", "mouse", "bird")
_DISHES: Final = ("pancakes", "soup", "apple cake", "bread", "fruit salad")
_GROUPS: Final = ("fruits", "animals", "colours", "planets", "cities")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to send."""

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None = None
    """None: the number for all requests of the benchmark."""


def built_in_prompts() -> tuple[Prompt, ...]:
    """Return prompts whose answers range from predictable to free.

    The acceptance of drafts depends mainly on the text, so the mixture is fixed: a third counts and
    multiplies, a third lists and explains, a third tells stories.
    """
    predictable = (
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
    kinds = (predictable, explaining, free)
    return tuple(
        Prompt(({"role": "user", "content": kind[index % len(kind)]},))
        for index in range(max(len(kind) for kind in kinds))
        for kind in kinds
    )


def read_prompts(file: Path) -> tuple[Prompt, ...]:
    """Read a prompt from each line: `{"prompt": "..."}` or `{"messages": [...]}`.

    A line may also contain `max_tokens`. Raise `MeasurementError` for an invalid line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{file} cannot be read: {error}") from None
    prompts = tuple(
        _read_line(f"{file}:{number}", line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )
    if not prompts:
        raise MeasurementError(f"{file} does not contain any prompts.")
    return prompts


def sample_prompts(prompts: Sequence[Prompt], count: int, random: Random) -> list[Prompt]:
    """Return `count` prompts in random order; none repeats before all others were used."""
    shuffled = itertools.chain.from_iterable(
        random.sample(prompts, len(prompts)) for _ in itertools.count()
    )
    return list(itertools.islice(shuffled, count))


def _read_line(place: str, line: str) -> Prompt:
    fields = json_object(line)
    if fields is None:
        raise MeasurementError(f"{place}: not a JSON object.")
    match fields.pop("prompt", None), fields.pop("messages", None):
        case str(text), None:
            messages = [{"role": "user", "content": text}]
        case None, [_, *_] as messages if all(isinstance(entry, dict) for entry in messages):
            pass
        case _:
            raise MeasurementError(
                f"{place}: must contain a 'prompt' (text) or 'messages' (a list)."
            )
    max_tokens = fields.pop("max_tokens", None)
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise MeasurementError(f"{place}: 'max_tokens' must be a whole number above 0.")
    if fields:
        raise MeasurementError(f"{place}: unknown field '{next(iter(fields))}'.")
    return Prompt(tuple(messages), max_tokens)
