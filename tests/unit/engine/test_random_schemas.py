"""Random answers to random schemas: whatever the grammar takes is valid, and JSON."""

from __future__ import annotations

import json
from random import Random

import jsonschema_rs
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tests.support.grammars import matcher
from tests.support.schemas import Schema, schemas
from workers.engine.lark_text import UnsupportedGrammar

ANSWERS = 3
LIMIT_BYTES = 400
ENDS = frozenset(b'"}],')


@settings(max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schemas(), st.integers(0, 2**32))
def test_every_answer_that_a_grammar_takes_is_valid(schema: Schema, seed: int) -> None:
    """A model chooses among the bytes that may come; here chance does."""
    random = Random(seed)
    try:
        state = matcher(schema)
    except UnsupportedGrammar as error:
        event(str(error))
        return
    if state.is_error():
        event(f"refused: {state.get_error().partition('JSON schema: ')[2][:30]}")
        return
    truth = jsonschema_rs.validator_for(schema, validate_formats=True)
    for _ in range(ANSWERS):
        text = walk(state.deep_copy(), random)
        if text is None:
            continue
        event("answered")
        value = json.loads(text)
        # JSON has numbers that no float holds; no model writes one.
        assert truth.is_valid(value) or "Infinity" in json.dumps(value), (text, schema)


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
