"""Grammars: hold an answer to a JSON Schema, an expression, a list of texts or a grammar.

llguidance compiles a constraint for the model's tokenizer, and tells after every token which ones
may come next. A grammar begins where the reasoning of the answer ends. A constraint is a client's:
its compilation has a thread of its own, and llguidance's limits on the size of grammars and on the
work for one token bound both.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.hf import from_tokenizer
from llguidance.numpy import (
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from transformers import PreTrainedTokenizerFast

from policies.request.constraint import Constraint, ConstraintKind
from workers.engine.reasoning import ANSWERING, NextToken, ReasoningState
from workers.engine.tokenizer import token_bytes
from workers.engine.types import InvalidGeneration

logger = logging.getLogger(__name__)

CACHED_GRAMMARS = 64
COMPILE_TIMEOUT_S = 10.0
_STACK_BYTES = 256 << 20
"""The compiler recurses along references: a schema of 64 KiB may refer thousands of levels deep."""

# One line, as Python writes JSON: models get lost in white space, and a separator that the grammar
# forces is a draft that the target accepts. No constraint is left out silently.
_JSON_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)

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

_Key: TypeAlias = tuple[Constraint, tuple[str, str] | None]

_UNSATISFIABLE = "No answer can satisfy the constraint."
# What llguidance's messages say, and what the client is told: its own text never leaves the worker.
_JSON_ERRORS = (
    (r'Unimplemented keys: \["([^"]{1,40})"', "The worker does not support the keyword '{}'."),
    (r"(oneOf)", "The worker supports '{}' only where no value fits two of its schemas."),
    (r"Unknown (format)", "The worker does not know this '{}'."),
    (r"(?:Expected .{1,80} for|invalid) '([^']{1,40})'", "The value of '{}' is invalid."),
    (r"(?i)invalid (type)\b|^(type) must", "The value of 'type' is invalid."),
    (r"Pointer|Resource|\$ref", "A '$ref' of the schema refers to no part of it."),
    (r"(?i)unsatisfiable", _UNSATISFIABLE),
    (r"(?i)regex|look-?around", "The worker does not support this value of 'pattern'."),
)  # fmt: skip
_TOO_COMPLEX = re.compile("(?i)too (large|many|complex|deep|big)|fuel|limit|Unable to determine")


class GrammarCompiler:
    """The compiled grammars of one model; methods are safe to call from any thread."""

    def __init__(self, processor: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._cache: OrderedDict[_Key, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._ends = sorted(ends)
        tokenizer = getattr(processor, "tokenizer", processor)
        before = threading.stack_size(_STACK_BYTES)
        try:  # starts the thread
            self._tokenizer = self._thread.submit(_load_tokenizer, tokenizer, vocabulary, ends)
        finally:
            threading.stack_size(before)

    @property
    def cached(self) -> int:
        """Return the number of compiled grammars."""
        return len(self._cache)

    async def matcher(
        self, constraint: Constraint, call_marks: tuple[str, str] | None = None
    ) -> Matcher:
        """Return a matcher at the beginning of an answer; raise `InvalidGeneration` without one.

        With `call_marks`, the answer may also call tools in the model's own format.
        """
        key = (constraint._replace(value=json.dumps(constraint.value)), call_marks)
        compiled = self._lookup(key)
        if compiled is None:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(COMPILE_TIMEOUT_S):
                    compiled = await loop.run_in_executor(
                        self._thread, self._compile, constraint, key
                    )
            except TimeoutError as error:
                raise _invalid(constraint, "The worker takes too long to compile it.") from error
        words = (self._tokenizer.result().vocab_size + 31) // 32
        return Matcher(compiled.deep_copy(), words, self._ends, constraint.param)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _lookup(self, key: _Key) -> LLMatcher | None:
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
            return compiled

    def _compile(self, constraint: Constraint, key: _Key) -> LLMatcher:
        compiled = self._lookup(key)  # another request may have compiled it meanwhile
        if compiled is not None:
            return compiled
        try:
            tokenizer = self._tokenizer.result()
        except Exception as error:
            logger.warning("grammar.no_tokenizer", exc_info=error)
            raise _invalid(constraint, "This model's tokenizer supports no constraints.") from error
        try:
            calls = _call_rule(tokenizer, *key[1]) if key[1] else None
            grammar = _grammar(constraint, calls)
            compiled = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
        except (ValueError, RecursionError) as error:
            raise _invalid(constraint, _explain(constraint, str(error))) from error
        if not compiled.is_error():
            compiled.compute_bitmask()  # the most expensive mask: here it delays nobody's answer
        if compiled.is_error():
            raise _invalid(constraint, _explain(constraint, compiled.get_error()))
        if compiled.is_stopped():
            raise _invalid(constraint, _UNSATISFIABLE)
        with self._lock:
            self._cache[key] = compiled
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled


class Matcher:
    """The place of one answer in its grammar; used by one thread at a time."""

    def __init__(self, state: LLMatcher, words: int, ends: Sequence[int], param: str) -> None:
        self.state = state
        self.words = words
        """Words of 32 bits that have a bit for every token."""
        self.ends = ends
        """Tokens that end an answer."""
        self._param = param

    @property
    def complete(self) -> bool:
        """Return whether nothing but the end may follow."""
        return bool(self.state.is_stopped())

    def advance(self, token: int) -> None:
        """Take the next token of the answer; raise `InvalidGeneration` if it may not come there.

        That happens only where the grammar got beyond llguidance's limits, and allows nothing.
        """
        if not self.state.consume_token(token):
            logger.info("grammar.failed error=%s", self.state.get_error())
            raise InvalidGeneration(
                self._param,
                "This constraint became too complex while the worker generated the answer.",
                "unsupported_value",
            )


class TokenRules(NamedTuple):
    """What decides which tokens may come next in one answer."""

    matcher: Matcher | None
    reasoning: ReasoningState | None = None
    missing: int = 0
    """Tokens that must come before one of `ends` may."""
    ends: frozenset[int] = frozenset()

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced, with -1 for each free token before them."""
        if self.reasoning is not None and not self.reasoning.next_token().answering:
            return self.reasoning.forced()
        return self.matcher.state.compute_ff_tokens() if self.matcher else ()

    def places(self, drafted: Sequence[int]) -> tuple[list[NextToken], NextToken | None]:
        """Return what may come at each position of a draft, up to where the grammar begins.

        The second value says what may come there; None if the grammar does not begin.
        """
        if self.reasoning is None:
            return [], ANSWERING
        places: list[NextToken] = []
        state = copy(self.reasoning)
        for at in range(len(drafted) + 1):
            place = state.next_token()
            begins = at < len(drafted) and drafted[at] == place.beginning
            if self.matcher and place.answering and not begins:
                return places, place
            places.append(place)
            if at < len(drafted):
                state.push(drafted[at])
        return places, None


def forced_drafts(rules: Sequence[TokenRules | None], drafts: mx.array) -> mx.array:
    """Replace the drafts [rows, k] by the tokens that the rules force, where they force any."""
    length = drafts.shape[1]
    forced = [[] if one is None else list(one.forced()[:length]) for one in rules]
    if not any(forced):
        return drafts
    padded = mx.array([run + [-1] * (length - len(run)) for run in forced], dtype=mx.int32)
    return mx.where(padded < 0, drafts, padded)


def allowed_tokens(
    rules: Sequence[TokenRules | None], vocabulary: int, drafts: mx.array | None = None
) -> mx.array | None:
    """Return a bit for each token that may come next: [rows, L, words] uint32; None if all may.

    Position i follows the first i of `drafts` [rows, L - 1]. What follows a draft that may not come
    there is undefined, since the draft will be rejected.
    """
    if not any(rules):
        return None
    length = 1 if drafts is None else drafts.shape[1] + 1
    drafted = [[]] * len(rules) if drafts is None or length == 1 else drafts.tolist()
    matchers = [one.matcher for one in rules if one and one.matcher]
    words = max([(vocabulary + 31) // 32, *(one.words for one in matchers)])
    bits = np.full((len(rules) * length, words), -1, dtype=np.int32)
    grammars: list[tuple[LLMatcher, int, list[int]]] = []
    fixed: list[tuple[int, NextToken, Matcher | None]] = []
    for index, one in enumerate(rules):
        if one is None:
            continue
        first, tokens = index * length, drafted[index]
        for at in range(min(one.missing, length)):
            _exclude(bits[first + at].view(np.uint32), one.ends)
        places, start = one.places(tokens)
        fixed += [(first + at, place, one.matcher) for at, place in enumerate(places)]
        if one.matcher and start is not None:
            grammars.append((one.matcher.state, first + len(places), tokens[len(places) :]))
            fixed.append((first + len(places), start, one.matcher))
        grammars += [
            (one.matcher.state, first + at, [])
            for at, place in enumerate(places)
            if one.matcher and place.answering
        ]
    followed = [place for place in grammars if place[2]]
    last = [place[:2] for place in grammars if not place[2]]
    if followed:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), followed, bits)
    # Within a draft, reasoning may begin and end: one call may not name a grammar twice.
    for group in [last] if length == 1 and last else [[place] for place in last]:
        fill_next_token_bitmask_par(_executor(), group, bits)
    for at, place, matcher in fixed:
        _restrict(bits[at].view(np.uint32), place, matcher)
    return mx.array(bits.view(np.uint32)).reshape(len(rules), length, words)


def _restrict(bits: np.ndarray[Any, Any], place: NextToken, matcher: Matcher | None) -> None:
    """Set the bits that a place in the reasoning adds to those of a grammar, or takes away."""
    if place.forced is not None:
        bits[:] = 0
        bits[place.forced // 32] |= np.uint32(1 << place.forced % 32)
    elif matcher and place.beginning is not None:
        bits[place.beginning // 32] |= np.uint32(1 << place.beginning % 32)
    elif matcher and not place.may_end:
        _exclude(bits, matcher.ends)


def _exclude(bits: np.ndarray[Any, Any], tokens: Iterable[int]) -> None:
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _load_tokenizer(tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> LLTokenizer:
    """Load the tokenizer for llguidance, with every token of the model's scores."""
    size, eos = max(vocabulary, len(tokenizer)), sorted(ends)
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        return from_tokenizer(tokenizer, n_vocab=size, eos_token=eos)
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer)), n_vocab=size, eos_token=eos)


class _Vocabulary:
    """What llguidance reads of a tokenizer that is not of the `tokenizers` package."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = tokenizer.all_special_ids
        self.tokens = [token_bytes(tokenizer, token) for token in range(len(tokenizer))]

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _call_rule(tokenizer: LLTokenizer, begin: str, end: str) -> str | None:
    """Return the rule of a call in the model's own format, if single tokens begin and end one."""
    marks = [tokenizer.tokenize_str(mark, parse_special=True) for mark in (begin, end)]
    if not all(len(mark) == 1 and tokenizer.is_special_token(mark[0]) for mark in marks):
        return None
    return f"call: <[{marks[0][0]}]> /(?s:.*)/ <[{marks[1][0]}]> /\\n*/"


def _grammar(constraint: Constraint, call_rule: str | None) -> str:
    """Return llguidance's form of a constraint; raise `ValueError` if it has none."""
    value = constraint.value
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


def _explain(constraint: Constraint, reason: str) -> str:
    """Return what a client is told about a constraint that llguidance refuses."""
    logger.info("grammar.refused reason=%s", reason[:500])
    if constraint.kind in (ConstraintKind.JSON, ConstraintKind.CALLS):
        # Without the place in the grammar, and without the schema itself.
        reason = re.sub(r"(?s)^.*?JSON schema: |\n +\d+ \|.*", "", reason)
        for pattern, message in _JSON_ERRORS:
            if found := re.search(pattern, reason):
                return message.format(*found.groups())
    if _TOO_COMPLEX.search(reason):
        return "It is too complex."
    nouns = {
        ConstraintKind.JSON: "schema",
        ConstraintKind.CALLS: "schema",
        ConstraintKind.REGEX: "regular expression",
    }
    return f"The worker does not support this {nouns.get(constraint.kind, 'grammar')}."


def _invalid(constraint: Constraint, message: str) -> InvalidGeneration:
    return InvalidGeneration(constraint.param, message, "unsupported_value")
