"""What is wrong with a document, in words of ours: pydantic's own are written for programmers."""

from __future__ import annotations

from typing import Final, get_args

from pydantic_core import ErrorDetails
from pydantic_core.core_schema import ErrorType

_SENTENCES: Final = {
    "extra_forbidden": "there is no such field",
    "missing": "it is missing",
    "too_short": "it needs at least {min_length}",
    "tuple_type": "it must be a list",
    "dict_type": "it must be a mapping",
    "model_type": "it must be a mapping",
    "bool_type": "it must be true or false",
    "int_type": "it must be a whole number",
    "float_type": "it must be a number",
    "string_type": "it must be text",
    "string_pattern_mismatch": "it must match {pattern}",
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
}
# Raised by checks of ours, with a sentence of theirs.
_OURS: Final = frozenset(("value_error", "assertion_error"))
_PYDANTICS: Final = frozenset(get_args(ErrorType)) - _OURS


def message_of(error: ErrorDetails) -> str:
    """Say what is wrong with one field; its name and its value are not repeated."""
    if known := _SENTENCES.get(error["type"]):
        return known.format(**error.get("ctx", {}))
    if error["type"] in _PYDANTICS:
        return "it cannot be read"
    return error["msg"].removeprefix("Value error, ")
