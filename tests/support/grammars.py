"""Grammars of JSON Schemas over bytes, without a model."""

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from paceline.request.constraint import Constraint, ConstraintKind
from workers.engine.text.grammar_source import grammar_source


def matcher(schema: Any) -> LLMatcher:
    """Return a matcher of bytes at the beginning of an answer."""
    tokenizer = LLTokenizer("byte")
    source = grammar_source(Constraint(ConstraintKind.JSON, schema, "form"), tokenizer, None)
    return LLMatcher(tokenizer, source, log_level=0)


def takes(state: LLMatcher, text: str) -> bool:
    """Return whether the whole text is an answer; `state` is then behind it."""
    tokens = list(text.encode())
    return bool(
        state.validate_tokens(tokens) == len(tokens)
        and state.consume_tokens(tokens)
        and state.is_accepting()
    )
