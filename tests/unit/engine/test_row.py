"""When the pieces of an answer are told: the first and the last at once, none lost between."""

from __future__ import annotations

from collections.abc import Sequence

from policies.request.profile import Sampling
from workers.engine.detokenizer import TextStream
from workers.engine.row import DELTA_INTERVAL_S, EventSink, Row, SpeculationCounter
from workers.engine.tokenizer import PreparedPrompt
from workers.engine.types import (
    Delta,
    EngineError,
    Event,
    Generation,
    LaneName,
    Prompt,
    TokenLogprob,
)

END = 0


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token != END)


def a_row(sink: EventSink) -> Row:
    return Row(
        generation=Generation(
            request_id="test",
            lane=LaneName.TEXT_MTP,
            prompt=Prompt(text=""),
            sampling=Sampling(temperature=0),
        ),
        prompt=PreparedPrompt(tokens=(1,)),
        seed=0,
        max_tokens=100,
        draft_tokens=0,
        text=TextStream(spell),
        speculation=SpeculationCounter(0),
        sink=sink,
    )


def told(*steps: tuple[float, str]) -> list[tuple[float, str]]:
    """Let a row take texts at moments; return what was told, and at which of them."""
    results: list[tuple[float, str]] = []
    at_s = 0.0

    def hear(event: Event | EngineError) -> None:
        assert isinstance(event, Delta)
        results.append((at_s, event.text))

    row = a_row(hear)
    for at_s, text in steps:  # read by the sink
        row.append_tokens([*map(ord, text)], {END}, now_s=100 + at_s)
    return results


def test_the_first_piece_is_told_at_once() -> None:
    assert told((0.0, "a")) == [(0.0, "a")]


def test_rounds_that_take_long_are_told_one_by_one() -> None:
    steps = [(number * DELTA_INTERVAL_S * 1.01, letter) for number, letter in enumerate("abcd")]
    assert told(*steps) == steps


def test_quick_rounds_are_told_together_and_the_end_at_once() -> None:
    third = DELTA_INTERVAL_S / 3
    steps = [(number * third * 1.01, letter) for number, letter in enumerate("abcdef")]
    end = (5.1 * third, chr(END))
    results = told(*steps, end)
    assert [text for _, text in results] == ["a", "bcd", "ef"]
    assert results[-1][0] == end[0]


def test_log_probabilities_wait_with_their_text() -> None:
    results: list[Event | EngineError] = []
    row = a_row(results.append)
    for number, letter in enumerate("abcd"):
        logprob = TokenLogprob(token_id=ord(letter), raw=letter.encode(), logprob=-1.0)
        row.append_tokens([ord(letter)], {END}, [logprob], now_s=number * DELTA_INTERVAL_S / 2)
    pieces = [event for event in results if isinstance(event, Delta)]
    assert [piece.text for piece in pieces] == ["a", "bc"]
    assert [[token.text for token in piece.logprobs] for piece in pieces] == [["a"], ["b", "c"]]


def test_a_token_is_told_with_the_place_of_the_character_it_is_a_part_of() -> None:
    """Also where a stop string may be beginning, and a draft brings several tokens at once."""
    results: list[Event | EngineError] = []
    row = a_row(results.append)
    row.text = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"), ("ending",))
    said = "a\U0001f642e\u00fc"
    raw = [bytes([byte]) for byte in said.encode()]
    logprobs = [TokenLogprob(token_id=byte[0], raw=byte, logprob=-1.0) for byte in raw]
    row.append_tokens(said.encode()[:3], {END}, logprobs[:3], now_s=0)
    row.append_tokens([*said.encode()[3:], END], {END}, [*logprobs[3:], logprobs[0]], now_s=1)
    told = [token for event in results if isinstance(event, Delta) for token in event.logprobs]
    assert [token.offset_chars for token in told] == [0, 1, 1, 1, 1, 2, 3, 3, 4]
    assert b"".join(token.raw for token in told[:-1]).decode() == said
