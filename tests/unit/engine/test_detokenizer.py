from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.detokenizer import TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode one byte per token; a broken character becomes U+FFFD."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    out = TextStream(decode_bytes, stop)
    pieces = []
    for byte in text.encode():
        pieces.append(out.push(byte))
        if out.stopped:
            return pieces, out
    pieces.append(out.flush())
    return pieces, out


@given(st.text())
def test_a_stream_returns_the_whole_text(text: str) -> None:
    pieces, _ = stream(text)

    assert "".join(pieces) == text


@given(st.text(min_size=1))
def test_no_piece_contains_half_a_character(text: str) -> None:
    pieces, _ = stream(text.replace("\ufffd", ""))

    assert not any("\ufffd" in piece for piece in pieces)


def test_a_broken_last_character_is_returned_by_flush() -> None:
    out = TextStream(decode_bytes)

    assert [out.push(byte) for byte in b"a\xc3"] == ["a", ""]
    assert out.flush() == "\ufffd"


@given(st.text(alphabet="ab"), st.lists(st.text(alphabet="ab", min_size=1), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    pieces, out = stream(text, tuple(stops))
    text_out = "".join(pieces)

    # A stop string counts at the token that completes it, as in the stream.
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first_end = min((end for end, _ in ends), default=None)
    expected = (
        text if first_end is None else text[: min(begin for end, begin in ends if end == first_end)]
    )
    assert (text_out, out.stopped) == (expected, first_end is not None)


def test_an_ending_that_may_become_a_stop_string_is_delayed() -> None:
    out = TextStream(decode_bytes, ("stop",))

    assert [out.push(byte) for byte in b"a st"] == ["a", " ", "", ""]
    assert out.push(ord("x")) == "stx"


def test_c17_each_token_of_an_invalid_text_decodes_a_bounded_window() -> None:
    longest = 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode_bytes(tokens)

    out = TextStream(decode)
    pieces = [out.push(0xE5) for _ in range(1000)]

    assert longest < 20
    assert "".join([*pieces, out.flush()]) == "\ufffd" * 1000
