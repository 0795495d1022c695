from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.text.detokenizer import TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode one byte per token; a broken character becomes U+FFFD."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(text: str, stop: Sequence[str] = ()) -> tuple[str, bool, list[str]]:
    """Return what a stream gives out, whether it stopped, and its pieces."""
    out = TextStream(decode_bytes, tuple(stop))
    pieces = []
    for byte in text.encode():
        pieces.append(out.push(byte))
        if out.stopped_by is not None:
            break
    else:
        pieces.append(out.flush())
    return "".join(pieces), out.stopped_by is not None, pieces


@given(st.text().map(lambda text: text.replace("\ufffd", "")))
def test_a_stream_returns_the_whole_text_and_no_half_of_a_character(text: str) -> None:
    whole, _, pieces = stream(text)
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_broken_last_character_and_what_may_become_a_stop_string_are_delayed() -> None:
    out = TextStream(decode_bytes)
    assert [out.push(byte) for byte in b"a\xc3"] == ["a", ""]
    assert out.flush() == "\ufffd"
    out = TextStream(decode_bytes, ("stop",))
    assert [out.push(byte) for byte in b"a stx"] == ["a", " ", "", "", "stx"]


@given(st.text(alphabet="ab"), st.lists(st.text(alphabet="ab", min_size=1), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """A stop string counts at the token that completes it, as in the stream."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    first_end, begin = min(ends, default=(None, None))
    assert stream(text, stops)[:2] == (text[:begin], first_end is not None)


def test_c17_each_token_of_an_invalid_text_decodes_a_bounded_window() -> None:
    lengths = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return decode_bytes(tokens)

    out = TextStream(decode)
    pieces = [out.push(0xE5) for _ in range(1000)]
    assert max(lengths) < 20
    assert "".join([*pieces, out.flush()]) == "\ufffd" * 1000
