"""Client's text in heads and in comments of streams."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.event_stream import comment_of
from paceline.http import encode_head


@given(st.lists(st.text(st.characters(max_codepoint=200))))
def test_l14_no_text_ends_its_line(texts: list[str]) -> None:
    headers = [(b"x-text", text.encode()) for text in texts]
    status, *lines, last, end = encode_head(200, headers).split(b"\r\n")
    assert (status, last, end) == (b"HTTP/1.1 200 OK", b"", b"")
    assert len(lines) == len(comment_of(headers).splitlines()[:-1]) == len(texts)
    for line, text in zip(lines, texts, strict=True):
        assert not set(line) & {*range(32), 127}
        if text.isprintable():
            assert line == b"x-text: " + text.encode()
