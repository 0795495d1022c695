"""The size of a picture, read from its header."""

import base64
import binascii
import contextlib
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from paceline.request import content
from paceline.request.content import PictureInvalid, content_of, decode_base64, read_size
from tests.support.images import data_url, encode_image, png_header


def random_picture(mode: str) -> Image.Image:
    """Return a picture of random bytes, which compresses little."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (303, 205), random.Random(1).randbytes(303 * 205 * channels))


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("png", "RGB", {}),
        ("png", "RGBA", {}),
        ("gif", "P", {}),
        ("jpeg", "RGB", {}),
        ("jpeg", "L", {"progressive": True}),
        ("jpeg", "RGB", {"exif": b"Exif\0\0" + bytes(60_000), "icc_profile": bytes(200_000)}),
        ("webp", "RGB", {}),
        ("webp", "RGB", {"lossless": True}),
        ("webp", "RGBA", {"exif": b"Exif\0\0" + bytes(100)}),
    ],
)
def test_the_size_matches_that_of_the_decoded_picture(kind: str, mode: str, options: Any) -> None:
    assert read_size(encode_image(random_picture(mode), kind, **options)) == (303, 205)


@pytest.mark.parametrize("marker", [0xC4, 0xC8, 0xCC])
def test_a_jpeg_may_have_tables_before_the_segment_with_its_size(marker: int) -> None:
    table = bytes((0xFF, marker)) + b"\0\x09" + bytes(7)
    frame = b"\xff\xc0\0\x11\x08" + (203).to_bytes(2) + (301).to_bytes(2) + bytes(10)
    for padding in (b"", b"\xff", b"\xff\xff"):
        content = b"\xff\xd8" + table + padding + frame
        assert read_size(data_url(content, "jpeg")) == (301, 203)


def test_a_decompression_bomb_is_measured_and_not_decoded() -> None:
    assert read_size(data_url(png_header(50_000, 50_000))) == (50_000, 50_000)


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://127.0.0.1/x.png", "file:///etc/passwd", "data:image/png;base64,"),
        *("data:image/svg+xml;base64,PHN2Zz4=", "data:image/png;base64,****"),
        data_url(b"no picture at all"),
        data_url(b"II*\x00" + bytes(40)),
        data_url(png_header(0, 5)),
        data_url(png_header(5, 5)[:20]),
        data_url(b"\xff\xd8\xff\xe0\0\x02" + b"\xff\xe0\0\x02" * 1000),
        data_url(b"\xff\xd8" + b"\xff" * 1000),
        data_url(b"RIFF\0\0\0\0WEBPVP8L" + bytes(20)),
    ],
    ids=lambda url: url[:40],
)
def test_content_that_is_no_picture_is_rejected(url: str) -> None:
    with pytest.raises(PictureInvalid):
        read_size(url)


GIF = b"GIF89a\x01\0\x01\0\x80\0\0" + bytes(6)  # a screen of one pixel, and two colors
GIF_FRAME = b",%b\x04\0\x05\0\0\x02\x01x\0"
JPEG_FRAME = b"\xff\xc0\0\x0b\x08%b%b\x01\0\0\0"


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + bytes(4)


def riff_chunk(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(4, "little") + data


PNG = png_header(1, 1)[:-8]  # without pixels
VP8 = riff_chunk(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + b"\x2c\x01\xc8\0")
WEBP = b"RIFF\0\0\0\0WEBP" + riff_chunk(b"VP8X", bytes(10))


@pytest.mark.parametrize(
    ("content", "kind", "size"),
    [
        (GIF + GIF_FRAME % bytes(4), "gif", (4, 5)),
        (GIF + GIF_FRAME % b"\x03\0\x02\0" + b";", "gif", (7, 7)),
        (GIF + b"!\xfe\xff" + bytes(255) + b"\0" + GIF_FRAME % bytes(4), "gif", (4, 5)),
        (GIF + (b"!\xf9\x04" + bytes(5) + GIF_FRAME % bytes(4)) * 2_000, "gif", (4, 5)),
        (GIF + b"\0\0" + GIF_FRAME % bytes(4), "gif", (4, 5)),
        (
            PNG + png_chunk(b"IHDR", bytes((0, 0, 0, 4, 0, 0, 0, 5, 8, 2, 0, 0, 0))),
            "png",
            (4, 5),
        ),
        (
            PNG + png_chunk(b"fcTL", bytes((0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 5))),
            "png",
            (4, 5),
        ),
        (WEBP + VP8, "webp", (300, 200)),
        (
            WEBP
            + riff_chunk(b"ANIM", bytes(6))
            + riff_chunk(b"ANMF", bytes(6) + b"\x2b\x01\0\xc7\0\0"),
            "webp",
            (300, 200),
        ),
        (
            b"\xff\xd8" + JPEG_FRAME % (b"\0\x01", b"\0\x01") + JPEG_FRAME % (b"\0\x05", b"\0\x04"),
            "jpeg",
            (4, 5),
        ),
    ],
)
def test_l16_the_largest_of_canvas_and_frames_counts(content, kind, size) -> None:
    """Decoders differ in which they show, and a policy must not be told the smaller one."""
    assert read_size(data_url(content, kind)) == size


@pytest.mark.parametrize(
    "content", [GIF + b"!\xfe" + b"\x01x" * 20_000, GIF + bytes(20_000), WEBP + bytes(40_000)]
)
def test_a_picture_of_endless_pieces_is_rejected(content: bytes) -> None:
    with pytest.raises(PictureInvalid):
        read_size(data_url(content))


def test_a_picture_may_fill_its_limit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "PICTURE_LIMIT_BYTES", 600)
    prefix, largest = "data:image/png;base64,", "A" * 800
    assert content_of(prefix + largest) == largest
    with pytest.raises(PictureInvalid, match="at most 600 bytes"):
        content_of(prefix + largest + "AAAA")


MAGICS = (b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", b"GIF89a", b"RIFF1234WEBPVP8 ", b"\xff\xd8\xff")


@given(st.sampled_from(MAGICS), st.binary(max_size=60))
def test_any_bytes_have_a_size_or_are_rejected(magic: bytes, rest: bytes) -> None:
    with contextlib.suppress(PictureInvalid):
        assert min(read_size(data_url(magic + rest))) > 0


@given(st.binary(max_size=300), st.integers(1, 80), st.integers(1, 5))
def test_a_base64_text_of_any_lines_is_decoded_in_pieces(data, line, chars) -> None:
    text = base64.b64encode(data).decode()
    lines = "".join(text[at : at + line] + "\r\n" for at in range(0, len(text), line))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content, "_BASE64_CHARS", 4 * chars)
        assert decode_base64(text) == decode_base64(lines) == data
        for wrong in "QQ==QQ== Q QQ QQ= =QQQ QQ\0= Q-_= QQ==A QQQQQQQQQ".split():
            with pytest.raises(binascii.Error):
                decode_base64(wrong)
