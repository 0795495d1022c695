"""Grammars: hold an answer to a JSON Schema, an expression, a list of texts or a grammar.

llguidance compiles a constraint for the model's tokenizer, and lists after every token which ones
may come next. A grammar begins where the reasoning of the answer ends. A constraint is a client's:
another process tries to compile it first, a thread of its own compiles it, and llguidance's limits
bound the work for one token.
"""

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from paceline.protocol import whole_scope
from paceline.request.constraint import TOOL_GRAMMARS, Constraint
from workers.engine.text.grammar_source import CALL_KINDS, Vocabulary, matcher_of
from workers.engine.text.grammar_trial import (
    STACK_BYTES,
    UNSATISFIABLE,
    ConstraintTrial,
    Refusal,
    explain,
)
from workers.engine.text.reasoning import ANSWERING, NextToken, ReasoningState
from workers.engine.text.tokenizer import token_bytes
from workers.engine.types import InvalidGeneration

logger = logging.getLogger(__name__)

CACHED_GRAMMARS = 32
"""Each may take up to what a trial may take."""
COMPILE_TIMEOUT_S = 60.0
_COMPUTED_FORCED_TOKENS = 16
"""More than any draft has."""
_FREE_S, _SHARE_S = 0.1, 0.005
"""CPU time that the masks of an answer may take, at once and for each of them. With 150,000 tokens,
a mask of usual schemas takes 0.02 to 1 ms, of a grammar of single letters 2 ms, and 5 ms at most.
"""

_KEY_CHARS = 100
_MASKS = ThreadPoolExecutor(thread_name_prefix="masks")
_Key: TypeAlias = tuple[str, Constraint, tuple[str, str] | None]
_Compiled: TypeAlias = tuple[LLMatcher, Sequence[int]]
"""A matcher at the beginning, and the tokens that are forced there."""

_Place: TypeAlias = tuple[int, Sequence[int]]
"""The index of a mask, and the tokens of a draft that follow there, each with its own index."""


class GrammarCompiler:
    """The compiled grammars of one model; all its matchers are made on one event loop."""

    def __init__(self, processor: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._cache: OrderedDict[_Key, _Compiled | Refusal] = OrderedDict()
        """The fault of a constraint that the worker refused."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of each scope: the thread has one constraint of it at a time, and takes the first."""
        self._ends = sorted(ends)
        self._trial: ConstraintTrial | None = None
        tokenizer = getattr(processor, "tokenizer", processor)
        before = threading.stack_size(STACK_BYTES)
        try:  # starts the thread
            self._tokenizer = self._thread.submit(self._load_tokenizer, tokenizer, vocabulary)
        finally:
            threading.stack_size(before)

    async def matcher(
        self,
        constraint: Constraint,
        call_marks: tuple[str, str] | None = None,
        scope: str | None = None,
    ) -> "Matcher":
        """Return a matcher at the beginning of an answer; raise `InvalidGeneration` without one.

        With `call_marks`, the answer may also call tools in the model's own format. Constraints of
        one isolation `scope` delay one of another scope by two compilations at most, and do not
        make it faster: the time of an answer reveals to nobody which schemas others use.
        """
        key = (scope or "", constraint._replace(value=json.dumps(constraint.value)), call_marks)
        compiled = self._lookup(key)
        if compiled is None:
            turn = self._turns.setdefault(whole_scope(scope or ""), asyncio.Lock())
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(COMPILE_TIMEOUT_S), turn:
                    compiled = self._lookup(key)  # another request may have compiled it meanwhile
                    if compiled is None:
                        work = partial(self._compile, constraint, key)
                        compiled = await loop.run_in_executor(self._thread, work)
            except TimeoutError as error:
                refusal = Refusal("The worker takes too long to compile it.")
                raise _invalid(constraint, refusal) from error
        if isinstance(compiled, Refusal):
            raise _invalid(constraint, compiled)
        words = (self._tokenizer.result().vocab_size + 31) // 32
        state, forced = compiled
        return Matcher(state.deep_copy(), words, self._ends, constraint.param, forced)

    def close(self) -> None:
        """End the thread and the process that it uses."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()

    def _lookup(self, key: _Key) -> _Compiled | Refusal | None:
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
            return compiled

    def _compile(self, constraint: Constraint, key: _Key) -> _Compiled | Refusal:
        """Compile a constraint, or return the fault for the client."""
        try:
            tokenizer = self._tokenizer.result()
        except Exception as error:  # whatever a tokenizer raises
            logger.warning("grammar.no_tokenizer", exc_info=error)
            return Refusal("This model's tokenizer supports no constraints.")
        assert self._trial is not None, "it is made with the tokenizer"
        compiled: _Compiled | Refusal
        source = self._trial.source(constraint, key[2])
        if isinstance(source, Refusal):
            compiled = source
        else:
            state = matcher_of(source, tokenizer)
            state.compute_bitmask()  # the most expensive mask: here it delays nobody's answer
            compiled = state, state.compute_ff_tokens()
            if state.is_error():
                compiled = Refusal(explain(constraint, state.get_error()))
            elif state.is_stopped():
                compiled = Refusal(UNSATISFIABLE)
        if isinstance(compiled, Refusal):
            logger.info("grammar.refused reason=%s", compiled.reason)
        with self._lock:
            self._cache[key] = compiled
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return compiled

    def _load_tokenizer(self, tokenizer: Any, size: int) -> LLTokenizer:
        size = max(size, len(tokenizer))
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            # Added tokens may be missing from the file of the tokenizer.
            backend = copy(tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            vocabulary = Vocabulary(size, self._ends, fast=backend.to_str())
        else:
            tokens = [token_bytes(tokenizer, token) for token in range(len(tokenizer))]
            vocabulary = Vocabulary(
                size,
                self._ends,
                tokens=[token.decode("latin-1") for token in tokens],
                special=tokenizer.all_special_ids,
            )
        self._trial = ConstraintTrial(vocabulary)
        return vocabulary.load(lambda text: list(tokenizer.encode(text, add_special_tokens=False)))


@dataclass(slots=True)
class Matcher:
    """The place of one answer in its grammar; used by one thread at a time."""

    state: LLMatcher
    words: int
    """Words of 32 bits that have a bit for every token."""
    ends: Sequence[int]
    """Tokens that end an answer."""
    param: str
    """Field of the constraint, for errors."""
    forced_run: Sequence[int] = ()
    """Forced tokens; `_passed` counts those that were generated."""
    _passed: int = 0
    _masks: int = 0
    _spent_s: float = 0.0
    """Time of this thread that the grammar has taken, the masks and all."""

    @property
    def complete(self) -> bool:
        """Return whether nothing but the end may follow."""
        return bool(self.state.is_stopped())

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced: all of them, or more than any draft has.

        They are computed once for a long text, which takes time for each of its letters.
        """
        if len(self.forced_run) - self._passed < _COMPUTED_FORCED_TOKENS:
            with self._charged():
                self.forced_run, self._passed = self.state.compute_ff_tokens(), 0
        return self.forced_run[self._passed : self._passed + _COMPUTED_FORCED_TOKENS]

    def advance(self, token: int) -> None:
        """Take the next token of the answer; raise `InvalidGeneration` if it may not come there.

        That happens only where the grammar got beyond llguidance's limits. It also raises if the
        grammar has taken more than its share of time, for which others wait.
        """
        expected = self._passed < len(self.forced_run) and token == self.forced_run[self._passed]
        self._passed = self._passed + 1 if expected else len(self.forced_run)
        with self._charged():
            # Beyond its limits llguidance allows the end alone, and takes it.
            taken = self.state.consume_token(token) and not self.state.is_error()
        if taken and self._spent_s <= _FREE_S + _SHARE_S * self._masks:
            return
        failed = self.state.is_error()  # its words may be those of the grammar
        logger.info("grammar.failed spent_s=%.2f too_complex=%s", self._spent_s, failed)
        raise InvalidGeneration(
            self.param,
            "This constraint is too costly: it became too complex, or its tokens took too long to "
            "find, while the worker generated the answer.",
            code="constraint_too_costly",
        )

    def fill(self, bits: np.ndarray[Any, Any], places: Sequence[_Place]) -> None:
        """Write the masks of places in the answer; runs in any thread, while no other uses it."""
        with self._charged():
            for at, drafted in places:
                self._masks += 1 + len(drafted)
                fill = self.state.unsafe_compute_mask_ptr_with_draft_token  # type: ignore[attr-defined]  # its stub lacks it
                fill(bits[at].ctypes.data, bits[at].nbytes, drafted)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        begun_s = thread_time()
        try:
            yield
        finally:
            self._spent_s += thread_time() - begun_s


class TokenRules(NamedTuple):
    """The constraint on the next tokens of one answer."""

    matcher: Matcher | None
    reasoning: ReasoningState | None = None
    missing: int = 0
    """Tokens that must come before one of `ends` may."""
    ends: frozenset[int] = frozenset()

    def forced(self) -> Sequence[int]:
        """Return the next tokens that are forced, with -1 for each free token before them."""
        if self.reasoning is not None and not self.reasoning.next_token().answering:
            return self.reasoning.forced()
        return self.matcher.forced() if self.matcher else ()

    def places(self, drafted: Sequence[int]) -> tuple[list[NextToken], NextToken | None]:
        """Return the allowed tokens at each position of a draft, up to where the grammar begins.

        The second value has the allowed tokens there; None if the grammar does not begin.
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


def given_drafts(given: Sequence[Sequence[int]], drafts: mx.array) -> mx.array:
    """Replace the drafts [rows, k] by the k given tokens of each row; -1 leaves a draft."""
    if all(token < 0 for tokens in given for token in tokens):
        return drafts
    tokens = mx.array(given, dtype=mx.int32)
    return mx.where(tokens < 0, drafts, tokens)


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
    grammars: list[tuple[Matcher, list[_Place]]] = []
    fixed: list[tuple[int, NextToken, Matcher | None]] = []
    early: list[tuple[int, frozenset[int]]] = []
    for index, one in enumerate(rules):
        if one is None:
            continue
        first, tokens = index * length, drafted[index]
        early += [(first + at, one.ends) for at in range(min(one.missing, length))]
        places, start = one.places(tokens)
        fixed += [(first + at, place, one.matcher) for at, place in enumerate(places)]
        if not one.matcher:
            continue
        # Within a draft, reasoning may begin and end.
        filled: list[_Place] = [
            (first + at, []) for at, place in enumerate(places) if place.answering
        ]
        if start is not None:
            filled.append((first + len(places), tokens[len(places) :]))
            fixed.append((first + len(places), start, one.matcher))
        if filled:
            grammars.append((one.matcher, filled))
    # A thread of Python's costs more than most masks, and lets the interpreter go meanwhile.
    fill = _MASKS.map if len(grammars) > 1 else map
    list(fill(lambda each: each[0].fill(bits, each[1]), grammars))
    for at, place, matcher in fixed:
        _restrict(bits[at].view(np.uint32), place, matcher)
    for at, ends in early:
        longer = bits[at].view(np.uint32).copy()
        _exclude(longer, ends)
        if longer.any():  # else the grammar is complete, and the answer too short
            bits[at] = longer.view(np.int32)
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


def _invalid(constraint: Constraint, refusal: Refusal) -> InvalidGeneration:
    param, path = constraint.param, refusal.path
    if refusal.function:
        param = f"{TOOL_GRAMMARS}.{refusal.function}.definition"
    elif path and constraint.kind in CALL_KINDS:
        function, *path = path
        param = f"tools[{constraint.tools.index(function)}].function.parameters"
    for key in path:
        param += f"[{key}]" if isinstance(key, int) else f".{key[:_KEY_CHARS]}"
    return InvalidGeneration(param, refusal.reason, "unsupported_value")
