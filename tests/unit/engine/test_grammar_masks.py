"""Masks of a grammar for drafted tokens: those of a matcher that has read each prefix of the draft.

The grammar reads a draft and goes back, so that it stands where the answer does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from transformers import AutoTokenizer

from workers.demo import CHECKPOINT
from workers.engine.text.grammar import Matcher, TokenRules, allowed_tokens
from workers.engine.text.grammar_source import matcher_of
from workers.engine.text.reasoning import detect_reasoning

FORMS: tuple[Any, ...] = (
    "(ab?)*c?",
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "reddish", 17]}, "maxItems": 3},
    {"type": "string", "pattern": "^(ab|ac)*d$"},
)
DRAFTED = 3


def matcher_after(tokenizer: LLTokenizer, form: int, tokens: Sequence[int]) -> LLMatcher:
    regex, json_schema = LLMatcher.grammar_from_regex, LLMatcher.grammar_from_json_schema
    source = (regex if isinstance(FORMS[form], str) else json_schema)(FORMS[form])
    matcher = matcher_of(source, tokenizer)
    assert not tokens or matcher.consume_tokens(list(tokens))
    return matcher


def allowed_after(tokenizer: LLTokenizer, form: int, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that a matcher allows which has read the whole answer anew."""
    mask = matcher_after(tokenizer, form, tokens).compute_bitmask()
    return tokens_of(np.frombuffer(mask, np.uint8))


def tokens_of(bits: mx.array | NDArray[np.uint8]) -> list[int]:
    as_bytes = np.array(bits).view(np.uint8)
    return np.flatnonzero(np.unpackbits(as_bytes, bitorder="little")).tolist()


@dataclass
class Answer:
    """One row: its form, and the tokens that its matcher has read."""

    tokenizer: LLTokenizer
    data: st.DataObject
    form: int
    tokens: list[int] = field(default_factory=list)

    def draw_next(self, drafted: Sequence[int] = ()) -> int | None:
        """Return a token that may come next and ends nothing, or None."""
        allowed = allowed_after(self.tokenizer, self.form, [*self.tokens, *drafted])
        going_on = [token for token in allowed if token not in self.tokenizer.eos_tokens]
        return self.data.draw(st.sampled_from(going_on)) if going_on else None

    def draw_draft(self) -> list[int]:
        draft: list[int] = []
        right = self.data.draw(st.integers(0, DRAFTED))
        while len(draft) < right and (token := self.draw_next(draft)) is not None:
            draft.append(token)
        any_token = st.integers(0, self.tokenizer.vocab_size - 1)
        return draft + [self.data.draw(any_token) for _ in range(DRAFTED - len(draft))]

    def check(self, rules: TokenRules, draft: Sequence[int], masks: mx.array) -> None:
        """Compare the masks with those of new matchers, up to the end of the draft."""
        for at in range(DRAFTED + 1):
            allowed = allowed_after(self.tokenizer, self.form, [*self.tokens, *draft[:at]])
            longer = [one for one in allowed if at >= rules.missing or one not in rules.ends]
            assert tokens_of(masks[at]) == (longer or allowed)
            if at == DRAFTED or draft[at] not in allowed or draft[at] in rules.ends:
                break  # what follows a wrong token is undefined


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_masks_of_a_draft_are_those_of_its_prefixes_before_and_after_a_rejection(
    tokenizer: LLTokenizer, data: st.DataObject
) -> None:
    """Several rows at once, with one between them that anything may follow."""
    vocabulary, ends = tokenizer.vocab_size, sorted(tokenizer.eos_tokens)
    rows: list[tuple[Answer, TokenRules]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        answer = Answer(tokenizer, data, data.draw(st.integers(0, len(FORMS) - 1)))
        for _ in range(data.draw(st.integers(0, 4))):
            if (token := answer.draw_next()) is not None:
                answer.tokens.append(token)
        state = matcher_after(tokenizer, answer.form, answer.tokens)
        matcher = Matcher(state, (vocabulary + 31) // 32, ends, "guided_json")
        missing = data.draw(st.integers(0, DRAFTED + 1))
        rows.append((answer, TokenRules(matcher, missing=missing, ends=frozenset(ends))))
    free = data.draw(st.integers(0, len(rows)))
    rules: list[TokenRules | None] = [one for _, one in rows]
    rules.insert(free, None)
    for _ in range(2):
        drafts = [answer.draw_draft() for answer, _ in rows]
        drafts.insert(free, [0] * DRAFTED)
        masks = allowed_tokens(rules, vocabulary, mx.array(drafts, dtype=mx.int32))
        assert masks is not None
        assert np.array(masks[free]).min() == 2**32 - 1
        others = [index for index in range(len(rules)) if index != free]
        for index, (answer, one) in zip(others, rows, strict=True):
            answer.check(one, drafts[index], masks[index])
            token = answer.draw_next()  # the target chooses for itself
            if token is not None and one.matcher is not None:
                one.matcher.advance(token)
                answer.tokens.append(token)


def test_a_grammar_begins_behind_the_reasoning_that_a_draft_ends(tokenizer: LLTokenizer) -> None:
    """Its masks are those of the answer so far, also where a draft has both."""
    processor = AutoTokenizer.from_pretrained(str(CHECKPOINT))
    processor.add_tokens(["<think>", "</think>"])
    reasoning = detect_reasoning(processor, "{% if x %}<think>\n\n</think>{% endif %}")
    assert reasoning is not None
    opened, closed = processor.convert_tokens_to_ids(["<think>", "</think>"])
    state = reasoning.begin([opened], constrained=True)
    words = (len(processor) + 31) // 32
    matcher = Matcher(matcher_after(tokenizer, 2, []), words, tokenizer.eos_tokens, "guided_json")
    rules = [TokenRules(matcher, state, ends=frozenset(tokenizer.eos_tokens))]
    first = allowed_after(tokenizer, 2, [])[0]
    thought = next(one for one in range(100, 200) if one not in allowed_after(tokenizer, 2, []))
    for draft, begins in (
        ([thought, closed, first], 2),
        ([closed, first, thought], 1),
        ([thought, thought, closed], 3),
    ):
        masks = allowed_tokens(rules, len(processor), mx.array([draft], dtype=mx.int32))
        assert masks is not None
        for at in range(begins):
            allowed = tokens_of(masks[0, at])
            assert {thought, closed} <= set(allowed)
            assert not set(tokenizer.eos_tokens) & set(allowed)
        for at in range(begins, len(draft) + 1):
            answered = draft[begins:at]
            if set(answered) <= {first}:
                assert tokens_of(masks[0, at]) == allowed_after(tokenizer, 2, answered)
