"""Plain messages for pydantic's validation errors, which address programmers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from itertools import islice
from typing import Final, get_args

from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

from paceline.names import MODEL_PATTERN, ONE_MODEL_PATTERN

_MESSAGES: Final = {
    "extra_forbidden": "unknown field",
    "missing": "this field is required",
    "too_short": "it needs at least {min_length}",
    "tuple_type": "it must be a list",
    "dict_type": "it must be a mapping",
    "model_type": "it must be a mapping",
    "too_long": "it may have at most {max_length}",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
    "path_type": "it must be a path",
    "string_type": "it must be text",
    "string_too_short": "it needs at least {min_length} characters",
    "string_too_long": "it may have at most {max_length} characters",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "finite_number": "it must be a finite number",
    "datetime_from_date_parsing": "it must be a time like 2026-01-31T18:00:00Z",
    "timezone_aware": "it needs a timezone, like 2026-01-31T18:00:00Z",
    "literal_error": "it must be {expected}",
    "enum": "it must be {expected}",
    "json_invalid": "it is not JSON",
}
_PATTERNS: Final = {
    MODEL_PATTERN: "it must be 1 to 255 printable characters",
    ONE_MODEL_PATTERN: "it must name one model: 1 to 255 printable characters without '*'",
}
# A first character, and then others up to a number: the form of all names.
_NAME_PATTERN: Final = re.compile(r"[(^$|]*\[(A-Z)?a-z0-9_?\]\[([^\]]+)\]\{0,(\d+)\}[)?$]*")
# The errors of validators in this package, which have messages of their own.
_OWN_ERRORS: Final = frozenset(("value_error", "assertion_error"))
_PYDANTIC_ERRORS: Final = frozenset(get_args(ErrorType)) - _OWN_ERRORS


_SUGGESTIONS_FROM = 200
"""A comparison takes microseconds, and a document may have thousands of names."""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that this one probably misspells, or an empty string."""
    candidates = [one for one in islice(known, _SUGGESTIONS_FROM) if len(one) <= 128]
    return next(iter(difflib.get_close_matches(name[:128], candidates, n=1)), "")


def message_of(error: ErrorDetails) -> str:
    """Return the message for one error, without the name and the value of its field."""
    if error["type"] == "string_pattern_mismatch":
        return _words_of(error["ctx"]["pattern"])
    if known := _MESSAGES.get(error["type"]):
        return known.format(**error.get("ctx", {}))
    if error["type"] in _PYDANTIC_ERRORS:
        return "it is invalid"
    return error["msg"].removeprefix("Value error, ")


def _words_of(pattern: str) -> str:
    """Return the rule that a text violates by not matching the pattern."""
    name = _NAME_PATTERN.fullmatch(pattern)
    if name is None:
        return _PATTERNS.get(pattern, f"it must match {pattern}")
    capitals, others, length = name.groups()
    letters = "A to Z, a to z" if capitals else "a to z"
    marks = re.sub(r"A-Z|a-z|0-9", "", others)
    spaces = ", spaces" if " " in marks else ""
    return (
        f"it must be 1 to {int(length) + 1} characters: letters ({letters}), digits{spaces} and "
        f"{' '.join(marks.replace(' ', ''))}; the first is a letter or digit"
    )
