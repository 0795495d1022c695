"""Constraints as llguidance reads them, and the vocabulary that it compiles them for.

Without MLX and transformers, because the process that tries a constraint imports it too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from policies.request.constraint import Constraint, ConstraintKind

LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)

# One line, as Python writes JSON: models get lost in white space, and a separator that the grammar
# forces is a draft that the target accepts. No constraint is left out silently.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}

# llguidance allows a leap second in every minute, and fractions without end.
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
_VALUES = frozenset({"const", "enum", "default", "examples"})


class Vocabulary(NamedTuple):
    """What llguidance needs of a model's tokenizer; all of it can be written as JSON."""

    size: int
    """Number of the model's scores."""
    ends: Sequence[int]
    """Tokens that end an answer."""
    fast: str = ""
    """The JSON of a tokenizer of the `tokenizers` package; empty for another one."""
    tokens: Sequence[str] = ()
    """The bytes of each token as Latin-1, for another tokenizer."""
    special: Sequence[int] = ()

    def load(self, encode: Callable[[str], list[int]] = lambda _: []) -> LLTokenizer:
        """Load it; `encode` tokenizes forced texts for a tokenizer that is not fast."""
        if self.fast:
            return LLTokenizer(self.fast, n_vocab=self.size, eos_token=list(self.ends))
        wrapped = TokenizerWrapper(_Tokens(self, encode))
        return LLTokenizer(wrapped, n_vocab=self.size, eos_token=list(self.ends))


@dataclass
class _Tokens:
    """The attributes that `TokenizerWrapper` reads."""

    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        self.eos_token_id = self.vocabulary.ends[0]
        self.special_token_ids = self.vocabulary.special
        self.tokens = [token.encode("latin-1") for token in self.vocabulary.tokens]

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)


def grammar_source(
    constraint: Constraint, tokenizer: LLTokenizer, call_marks: Sequence[str] | None
) -> str:
    """Return llguidance's form of a constraint; raise any exception if it has none.

    With `call_marks`, the answer may also call tools between them.
    """
    value = constraint.value
    call_rule = _call_rule(tokenizer, *call_marks) if call_marks else None
    match constraint.kind:
        case ConstraintKind.JSON if call_rule:
            rules = ("start: form | call+", f"form: {_lark_json(value)}", call_rule)
            return LLMatcher.grammar_from_lark("\n".join(rules))
        case ConstraintKind.JSON:
            return LLMatcher.grammar_from_lark(f"start: {_lark_json(value)}")
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(value)
        case ConstraintKind.CHOICE:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(any_to_lark(value))
        case ConstraintKind.CALLS:
            return LLMatcher.grammar_from_lark(_lark_calls(**value))


def _call_rule(tokenizer: LLTokenizer, begin: str, end: str) -> str | None:
    """Return the rule of a call in the model's own format, if single tokens begin and end one."""
    marks = [tokenizer.tokenize_str(mark, parse_special=True) for mark in (begin, end)]
    if not all(len(mark) == 1 and tokenizer.is_special_token(mark[0]) for mark in marks):
        return None
    return f"call: <[{marks[0][0]}]> /(?s:.*)/ <[{marks[1][0]}]> /\\n*/"


def _lark_json(schema: Any) -> str:
    """Return Lark's expression of a JSON Schema."""
    if schema is False:
        raise ValueError("unsatisfiable")
    options = {} if schema is True else _with_patterns(schema)
    return "%json " + json.dumps({**options, "x-guidance": _JSON_OPTIONS})


def _with_patterns(schema: Any) -> Any:
    """Return a schema with patterns for the formats of dates and times."""
    if isinstance(schema, list):
        return [_with_patterns(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {
        name: part if name in _VALUES else _with_patterns(part) for name, part in schema.items()
    }
    form, more = parts.get("format"), parts.get("allOf", [])
    if isinstance(form, str) and form in _PATTERNS and isinstance(more, list):
        del parts["format"]
        parts["allOf"] = [*more, {"pattern": _PATTERNS[form]}]
    return parts


def _lark_calls(limit: int, functions: Mapping[str, Any]) -> str:
    """Return the grammar of a list of calls; every function's schema refers to itself alone."""
    calls, rules = [], []
    for index, (name, parameters) in enumerate(functions.items()):
        begin = f'{{"name": {json.dumps(name)}, "arguments": '
        calls.append(f'{json.dumps(begin)} arguments_{index} "}}"')
        schema = {"type": "object", **(parameters or {"additionalProperties": False})}
        rules.append(f"arguments_{index}: {_lark_json(schema)}")
    more = f'(", " call){{0,{limit - 1}}}' if limit > 1 else ""
    start = f'start: "[" call {more} "]"'
    return "\n".join([start, f"call: {' | '.join(calls)}", *rules])
