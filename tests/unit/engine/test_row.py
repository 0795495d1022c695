"""Deltas of an answer: the first and the last are sent at once, and no text is lost."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from paceline.protocol import DraftSource
from paceline.request.profile import Sampling
from workers.engine.decode.row import DELTA_INTERVAL_S, EventSink, Row
from workers.engine.text.detokenizer import TextStream
from workers.engine.text.grammar import Matcher, TokenRules
from workers.engine.text.reasoning import MarkedReasoning, Reasoning
from workers.engine.text.tokenizer import PreparedPrompt
from workers.engine.types import (
    Delta,
    EngineError,
    Event,
    Generation,
    LaneName,
    Prompt,
    SourcedToken,
    TokenLogprob,
)

END = 0


def spell(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens if token != END)


def make_row(sink: EventSink, *, token_sources: bool = False) -> Row:
    generation = Generation(
        request_id="test",
        lane=LaneName.TEXT_MTP,
        prompt=Prompt(text=""),
        sampling=Sampling(temperature=0),
        token_sources=token_sources,
    )
    return Row(
        generation=generation,
        prompt=PreparedPrompt(tokens=(1,)),
        seed=0,
        max_tokens=100,
        ends=frozenset({END}),
        draft_tokens=0,
        text=TextStream(spell),
        sink=sink,
    )


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def recorded_row(**options: bool) -> tuple[Row, list[Delta]]:
    """Return a row of bytes, and a list that gets its deltas."""
    deltas: list[Delta] = []

    def record(event: Event | EngineError) -> None:
        if isinstance(event, Delta):
            deltas.append(event)

    row = make_row(record, **options)
    row.text = TextStream(decode_bytes)
    return row, deltas


def sent_deltas(*steps: tuple[float, str]) -> list[tuple[float, str]]:
    """Append texts to a row at these times; return the deltas with their times."""
    deltas: list[tuple[float, str]] = []
    at_s = 0.0

    def on_event(event: Event | EngineError) -> None:
        assert isinstance(event, Delta)
        deltas.append((at_s, event.text))

    row = make_row(on_event)
    for at_s, text in steps:  # the sink reads at_s
        row.append_tokens([*map(ord, text)], now_s=100 + at_s)
    return deltas


def test_the_first_delta_and_those_of_slow_steps_are_sent_at_once() -> None:
    steps = [(number * DELTA_INTERVAL_S * 1.01, letter) for number, letter in enumerate("abcd")]
    for count in (1, 4):
        assert sent_deltas(*steps[:count]) == steps[:count]


def test_fast_steps_share_a_delta_and_the_end_is_sent_at_once() -> None:
    third = DELTA_INTERVAL_S / 3
    steps = [(number * third * 1.01, letter) for number, letter in enumerate("abcdef")]
    end = (5.1 * third, chr(END))
    deltas = sent_deltas(*steps, end)
    assert [text for _, text in deltas] == ["a", "bcd", "ef"]
    assert deltas[-1][0] == end[0]


def test_an_answer_ends_with_the_time_of_the_tokens_that_followed_its_first() -> None:
    row = make_row(lambda _event: None)
    for at_s, text in ((100.0, "a"), (100.5, "bcd"), (101.0, f"e{chr(END)}")):
        row.append_tokens([*map(ord, text)], now_s=at_s)
    finished = row.finished_event()
    assert (finished.timed_tokens, finished.generation_s) == (5, 1.0)


def test_log_probabilities_are_sent_with_their_text() -> None:
    row, deltas = recorded_row()
    for number, letter in enumerate("abcd"):
        logprob = TokenLogprob(token_id=ord(letter), raw=letter.encode(), logprob=-1.0)
        row.append_tokens([ord(letter)], [logprob], now_s=number * DELTA_INTERVAL_S / 2)
    assert [(delta.text, [token.text for token in delta.logprobs]) for delta in deltas] == [
        *(("a", ["a"]), ("bc", ["b", "c"]))
    ]


def test_a_logprob_has_the_offset_of_its_character() -> None:
    """Even if a stop string may begin there, or a draft adds several tokens at once."""
    row, deltas = recorded_row()
    row.text = TextStream(decode_bytes, ("ending",))
    answer = "a\U0001f642e\u00fc"
    raw = [bytes([byte]) for byte in answer.encode()]
    logprobs = [TokenLogprob(token_id=byte[0], raw=byte, logprob=-1.0) for byte in raw]
    row.append_tokens(answer.encode()[:3], logprobs[:3], now_s=0)
    row.append_tokens([*answer.encode()[3:], END], [*logprobs[3:], logprobs[0]], now_s=1)
    tokens = [token for delta in deltas for token in delta.logprobs]
    assert [token.offset_chars for token in tokens] == [0, 1, 1, 1, 1, 2, 3, 3, 4]
    assert b"".join(token.raw for token in tokens[:-1]).decode() == answer


@given(
    text=st.text(alphabet="ab\u00fc\U0001f642", max_size=20),
    stop=st.lists(st.text(alphabet="ab\u00fc", min_size=1, max_size=3), max_size=2),
    drafts=st.lists(st.integers(0, 3), min_size=100, max_size=100),
    ended=st.booleans(),
)
def test_the_texts_of_all_tokens_joined_are_the_answer(text, stop, drafts, *, ended) -> None:
    """For tokens of one byte, steps of any length, stop strings, and with an end token or without.

    Each token comes once, with its source, and no later than the delta after its text.
    """
    row, deltas = recorded_row(token_sources=True)
    row.text = TextStream(decode_bytes, stop)
    tokens = [*text.encode(), END] if ended else list(text.encode())
    row.max_tokens = len(tokens)
    sources: list[bool] = []
    given_text = joined = ""
    for number, accepted in enumerate(drafts):
        step = tokens[len(sources) : len(sources) + accepted + 1]
        if not step or row.finish_reason:
            break
        drafted = [DraftSource.LOOKUP] * (len(step) - 1)
        fitted = row.append_tokens(step, (), drafted, now_s=number * DELTA_INTERVAL_S * 0.7)
        sources += [index < len(step) - 1 for index in range(fitted)]
        given_text = "".join(delta.text for delta in deltas)
        joined = "".join(token.text for delta in deltas for token in delta.tokens)
        assert given_text.startswith(joined)
    assert joined == given_text
    assert [token.source is not None for delta in deltas for token in delta.tokens] == sources


def test_a_token_without_text_comes_without_delay() -> None:
    """It begins a character, which the next token completes."""
    row, deltas = recorded_row(token_sources=True)
    for number, byte in enumerate("\u00fc".encode()):
        row.append_tokens([byte], now_s=number)
    tokens = [delta.tokens for delta in deltas]
    assert tokens == [(SourcedToken("", None),), (SourcedToken("\u00fc", None),)]


def test_a_row_holds_its_prompt_and_all_of_its_answer_but_the_last_token() -> None:
    row, _ = recorded_row()
    held = []
    for byte in b"abc":
        held.append((row.context_tokens, row.slots_after(2), row.slots_after(1000)))
        row.append_tokens([byte], now_s=0)
    row.skipped_tokens = 1
    assert held == [(1, 3, 101), (1, 3, 100), (2, 4, 100)]
    assert (row.context_tokens, row.slots_used) == (3, 2)


def test_what_a_grammar_forces_leaves_room_for_the_token_after_it() -> None:
    row, _ = recorded_row()
    row.matcher = cast("Matcher", SimpleNamespace(forced=lambda: range(9)))
    for max_tokens, forced in ((100, 9), (5, 4), (1, 0)):
        row.max_tokens = max_tokens
        assert len(row.forced_tokens()) == forced
    row.max_tokens, row.draft_tokens_fixed = 100, True
    assert not row.forced_tokens()


def test_no_rule_holds_once_the_answer_has_its_least_tokens() -> None:
    row, _ = recorded_row()
    row.generation = replace(row.generation, min_tokens=2)
    assert row.token_rules(0) == TokenRules(None, None, 2, row.ends)
    row.append_tokens([*b"ab"], now_s=0)
    assert row.token_rules(0) is None


def test_a_replay_changes_nothing_but_the_tokens_that_the_caches_hold() -> None:
    row, deltas = recorded_row()
    for number, byte in enumerate(b"abcd"):
        row.append_tokens([byte], now_s=number)
    row.replay()
    assert (row.answer, row.context_tokens, len(deltas)) == ([*b"a"], 1, 4)
    row.append_tokens([7], now_s=10)
    row.replay()
    while row.replayed:
        assert row.append_tokens([7], now_s=11) == 1
    assert (row.answer, len(deltas)) == ([*b"abcd"], 4)
    row.append_tokens([*b"e", END], now_s=12)
    assert "".join(delta.text for delta in deltas) == "abcde"


SWITCH = 1
"""A token that switches between reasoning and answer."""


def reasoning_row(**options: bool) -> tuple[Row, list[Delta]]:
    """Return a row of bytes whose reasoning is apart, and a list that gets its deltas."""
    row, deltas = recorded_row(**options)
    row.text = TextStream(decode_bytes, strip=True)
    state = MarkedReasoning(
        begin_mark=SWITCH, end_mark=SWITCH, closing=(SWITCH,), label=(), repeats=True,
        is_blank=lambda _: False,
    )  # fmt: skip
    row.reasoning = Reasoning(state, TextStream(decode_bytes, strip=True))
    return row, deltas


def test_a_character_that_a_mark_cuts_comes_before_the_text_behind_the_mark() -> None:
    row, deltas = reasoning_row()
    row.append_tokens([*b"a", SWITCH, *b"b\xc3", SWITCH, *b"c", SWITCH, *b"d", END], now_s=0)
    assert "".join(delta.reasoning + delta.text for delta in deltas) == "ab\ufffdcd"


@given(
    parts=st.lists(st.text(alphabet="ab\u00fc \U0001f642", max_size=6), max_size=6),
    steps=st.lists(st.integers(1, 4), min_size=100, max_size=100),
)
def test_reasoning_and_answer_keep_their_order(parts: list[str], steps: list[int]) -> None:
    """In whatever deltas they come; the texts of all tokens joined are both, in order.

    White space before the first reasoning and the first answer is left out.
    """
    row, deltas = reasoning_row(token_sources=True)
    tokens = [*bytes([SWITCH]).join(part.encode() for part in parts), END]
    row.max_tokens = len(tokens) + 1
    now_s = 0.0
    while tokens:
        step, tokens = tokens[: steps[0]], tokens[steps[0] :]
        steps = steps[1:]
        now_s += DELTA_INTERVAL_S * 0.4
        row.append_tokens(step, (), [DraftSource.HEAD] * (len(step) - 1), now_s=now_s)
    answer, reasoning = ("".join(parts[at::2]).lstrip() for at in (0, 1))
    assert "".join(delta.text for delta in deltas) == answer
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    given_text = "".join(delta.reasoning + delta.text for delta in deltas)
    assert "".join(token.text for delta in deltas for token in delta.tokens) == given_text
    order, seen = "", [False, False]
    for number, part in enumerate(parts):
        shown = part if seen[number % 2] else part.lstrip()
        seen[number % 2] |= bool(shown)
        order += shown
    assert given_text == order
