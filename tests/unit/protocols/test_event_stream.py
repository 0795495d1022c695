"""The stream scanner: bytes that pass, bytes that it hides and its state, for any split."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.event_stream import StreamScanner, StreamState
from gateway.protocols.openai import CHAT, OpenAIStreamEncoder
from gateway.types import Drafts, Usage
from paceline.protocol import MAX_DRAFT_TOKENS
from tests.support.request_profiles import GREEDY
from tests.support.scripted_worker import DONE, chunk, event, stream_events, usage_chunk


def scanner_of(
    *,
    hide_usage: bool = True,
    hide_metrics: bool = True,
    usage_interval: int | None = None,
    limit_bytes: int = 4096,
) -> StreamScanner:
    """Return a scanner whose events a chat client receives."""
    profile = GREEDY._replace(include_usage=not hide_usage, usage_interval=usage_interval)
    encoder = OpenAIStreamEncoder(profile, include_metrics=not hide_metrics)
    return StreamScanner(encoder, CHAT.keep_alive, limit_bytes=limit_bytes)


def scan(*pieces: bytes, **options: Any) -> tuple[bytes, StreamState]:
    scanner = scanner_of(**options)
    return b"".join([*map(scanner.feed, pieces), scanner.close()]), scanner.state


def test_events_with_the_sources_of_tokens_pass_unparsed() -> None:
    source = {"text": "a", "source": "draft"}
    choice = {"index": 0, "delta": {"content": "a"}, "token_sources": [source]}
    assert not scanner_of().has_facts(event({"choices": [{**choice, "finish_reason": None}]}))


LINE_END = st.sampled_from([b"\n", b"\r\n", b"\r"])
WORDS = st.text(max_size=12) | st.sampled_from(
    ['"usage":{', "[DONE]", '"error":"x"', "\n\n", "usage", 'data: {"error": 1}', "\r"]
)
FRAMES = st.one_of(
    st.builds(
        lambda name, word: chunk({name: word}),
        st.sampled_from(["content", "reasoning_content", "reasoning"]),
        WORDS,
    ),
    st.sampled_from(["stop", "length", "tool_calls"]).map(lambda reason: chunk({}, reason)),
    st.sampled_from(
        [
            usage_chunk(),
            DONE,
            b": keep alive\n\n",
            b"event: x\nid: 4\ndata: {}\n\n",
            b"\n\n",
            event({"error": {"message": "no"}}),
            b"data: not json\n\n",
            b"data: 5\n\n",
            b'data: {"choices":\ndata: []}\n\n',
            event({"choices": [None, 5, {"delta": 1}], "usage": {"prompt_tokens": -1}}),
            b"data: " + b"x" * 300 + b"\n\n",
        ]
    ),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    end = draw(LINE_END)
    frames = draw(st.lists(FRAMES, max_size=8))
    cut = draw(st.binary(max_size=3) | st.just(b"data: half"))
    return b"".join(frames).replace(b"\n", end) + cut


@given(streams(), st.data(), st.booleans(), st.booleans())
def test_any_split_of_the_bytes_gives_the_same_output_and_state(
    stream: bytes, data: st.DataObject, hide_usage: bool, hide_metrics: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    one_by_one = [bytes([byte]) for byte in stream]
    options: Any = {"hide_usage": hide_usage, "hide_metrics": hide_metrics, "limit_bytes": 256}
    unsplit = scan(stream, **options)
    assert scan(*pieces, **options) == scan(*one_by_one, **options) == unsplit


@given(st.lists(WORDS, min_size=1, max_size=6), LINE_END)
def test_a_valid_stream_passes_unchanged_with_openais_end(words: list[str], end: bytes) -> None:
    *events, done = (event.replace(b"\n", end) for event in stream_events(words))
    stream = b"".join(events)
    shown: Any = {"hide_usage": False, "hide_metrics": False}
    output, state = scan(stream + done.replace(b"data: ", b"data:"), **shown)
    assert output == stream + b"data: [DONE]\n\n"
    assert state.complete
    assert not state.broken
    assert state.usage == Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)
    assert state.drafts == Drafts(1, 2, 1, histogram=(0, 1, 0))


@pytest.mark.parametrize("lines", [b'{"\n\r\n', b"event: ping\n\n", b"data\n\n", b"id: 4\n\n"])
def test_lines_without_data_precede_no_text_unless_they_are_a_comment(lines: bytes) -> None:
    first, comment = chunk({"content": "one"}), b": queued\n\n"
    assert scan(lines + comment + lines + first)[0] == comment + first


def test_l11_comments_that_come_together_cause_one_event_of_a_format_that_adds_one() -> None:
    """In Responses it is the whole response, which an engine would multiply by five bytes each."""
    added, comment = b"data: {}\n\n", b": x\n\n"
    scanner = StreamScanner(scanner_of().encoder, lambda one: one + added)
    for piece in (comment, comment * 3):
        assert scanner.feed(piece) == piece.replace(comment, comment + added, 1)


def test_a_histogram_may_have_every_position_that_a_worker_can_draft() -> None:
    by_accepted = tuple(range(MAX_DRAFT_TOKENS + 1))
    usage = json.loads(usage_chunk().removeprefix(b"data: "))
    usage["metrics"]["speculative_decoding"]["acceptance_histogram"] = [*by_accepted, 7]
    drafts = scan(event(usage))[1].drafts
    assert drafts is not None
    assert drafts.histogram == by_accepted


def test_the_trailing_chunk_is_sent_with_its_metrics_or_without_them() -> None:
    stream = b"".join(stream_events(["one"]))
    usage = json.loads(usage_chunk().removeprefix(b"data: "))
    assert scan(stream, hide_metrics=False)[0] == stream
    assert usage.pop("metrics")["speculative_decoding"]["num_spec_steps"] == 1
    output, state = scan(stream, hide_usage=False)
    assert output == stream.replace(usage_chunk(), event(usage))
    assert state.drafts is not None, "hidden metrics are still recorded"
    without = chunk({}, "stop"), event(usage | {"metrics": None}), DONE
    assert scan(*without, hide_metrics=False)[0] == without[0] + DONE


@pytest.mark.parametrize(
    ("shown", "usage"),
    [
        ({}, {}),
        ({"hide_usage": False}, {"usage": None}),
        ({"hide_usage": False, "usage_interval": 0}, {"usage": {"prompt_tokens": 4}}),
    ],
)
def test_a_client_gets_the_usage_that_it_asks_for(shown, usage) -> None:
    frame = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    stream = [event(frame | {"usage": {"prompt_tokens": 4}}), chunk({}, "stop"), DONE]
    output, state = scan(*stream, **shown)
    assert output == event(frame | usage) + chunk({}, "stop") + DONE
    assert state.usage == Usage(prompt_tokens=4, completion_tokens=0, cached_known=False)


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_l11_no_text_that_is_no_utf_8_passes_in_any_split(size: int) -> None:
    word = chunk({"content": "w"})
    broken = word.replace(b'"w"', b'"\xff"')
    with_usage = event({"choices": [{"delta": {"content": "u"}}], "usage": {"prompt_tokens": 4}})
    stream = word + with_usage + word + broken + word + chunk({}, "stop") + DONE
    pieces = [word, *(stream[at : at + size] for at in range(len(word), len(stream), size))]
    output, state = scan(*pieces)
    assert b"\xff" not in output
    assert state.broken


def test_text_of_the_model_is_never_read_as_a_field_of_the_stream() -> None:
    text = 'text "finish_reason":"stop", "usage":{"prompt_tokens":9}, "error":{} and [DONE]'
    output, state = scan(chunk({"content": text}))
    assert output == chunk({"content": text})
    assert (state.finished, state.done, state.usage, state.broken) == (False, False, None, "")


def test_no_event_passes_after_an_error_or_after_done() -> None:
    first, late = chunk({"content": "a"}, "stop"), chunk({"content": "b"})
    output, state = scan(first + event({"error": {"message": "no"}}) + late + DONE)
    assert (output, state.complete) == (first, False)
    assert state.broken
    endless = b"data: " + b"x" * 200
    output, state = scan(first, DONE, late, DONE, endless, endless, limit_bytes=300)
    assert (output, state.complete, state.broken) == (first + DONE, True, "")


def test_an_event_without_end_is_bounded() -> None:
    scanner = scanner_of(limit_bytes=100)
    for _ in range(50):
        assert scanner.feed(b"data: xxxx") == b""
    assert scanner.state.broken == "an event is too long"


@pytest.mark.parametrize(
    ("frame", "seen"),
    [
        (chunk({"role": "assistant", "content": ""}), False),
        (chunk({"role": "assistant"}), False),
        (chunk({"tool_calls": [{"index": 0}]}), True),
        (chunk({"content": "Hm"}), True),
        (chunk({"reasoning_content": "Hm"}), True),
        (event({"choices": [{"index": 0, "text": "x"}]}), True),
    ],
)
def test_texts_reasoning_and_calls_count_as_content(frame: bytes, seen: bool) -> None:
    assert scan(frame)[1].content_seen is seen
