"""Random answers to random schemas: whatever the grammar takes is valid, and JSON."""

import json
from random import Random

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.support.grammars import matcher
from tests.support.schemas import Schema, schemas
from workers.engine.text.lark_text import UnsupportedGrammar

ANSWERS = 3
LIMIT_BYTES = 400
ENDS = frozenset(b'"}],')


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.proof)])
def test_every_answer_that_a_grammar_takes_is_valid(examples: int) -> None:
    """A model chooses among the bytes that may come; here chance does."""

    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schemas(), st.integers(0, 2**32))
    def search(schema: Schema, seed: int) -> None:
        random = Random(seed)
        try:
            state = matcher(schema)
        except UnsupportedGrammar:
            return
        if state.is_error():
            return
        truth = jsonschema_rs.validator_for(schema, validate_formats=True)
        for _ in range(ANSWERS):
            text = walk(state.deep_copy(), random)
            # JSON has numbers that no float holds; no model writes one.
            if text is not None and "Infinity" not in json.dumps(value := json.loads(text)):
                assert truth.is_valid(value), (text, schema)

    search()


def walk(state: LLMatcher, random: Random) -> str | None:
    """Return an answer that the grammar takes; None if it gets too long, or nothing can follow."""
    answer = bytearray()
    while len(answer) < LIMIT_BYTES and not state.is_stopped():
        bits = state.compute_bitmask()
        allowed = [byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]
        if state.is_accepting() and (not allowed or random.random() < 0.5):
            break
        closing = [byte for byte in allowed if byte in ENDS]
        plain = [byte for byte in allowed if 32 <= byte < 127]
        if closing and (len(answer) > 60 or random.random() < 0.2):
            allowed = closing
        elif plain and random.random() < 0.7:
            allowed = plain
        if not allowed:
            return None
        byte = random.choice(allowed)
        assert state.consume_token(byte)
        answer.append(byte)
    return answer.decode() if state.is_accepting() or state.is_stopped() else None
