"""Strict JSON of requests: its bounds, and the pieces of large texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from gateway import strict_json
from gateway.errors import BodyNotJson
from gateway.strict_json import encode_body, encode_json, parse
from tests.support.json_values import VALUES


@pytest.mark.parametrize(
    ("item", "most", "name"),
    [
        (b"[],", 100_000 - 2, "100,000 objects and lists"),
        (b'"{",', 100_000 - 2, "100,000 objects and lists"),
        (b"1,", 1_000_000, "1,000,000 values"),
        (rb'"\n\n\n\n\n",', 300_000, "1,500,000 escaped characters"),
        ('"' + "\u20ac" * 1000 + '",', 4194, "12,582,912 bytes of characters beyond ASCII"),
    ],
    ids=["lists", "braces in texts", "numbers", "escapes", "wide characters"],
)
def test_c16_a_body_has_bounds_on_what_is_slow_to_parse(
    item: bytes | str, most: int, name: str
) -> None:
    """They count text too: telling it from structure would take as long as parsing."""
    one = item if isinstance(item, bytes) else item.encode()

    def body(count: int) -> bytes:
        return b'{"metadata":[' + one * count + b"1]}"

    assert len(parse(body(most))["metadata"]) == most + 1
    with pytest.raises(BodyNotJson, match=f"at most {name}"):
        parse(body(most + 1))


def test_a_long_plain_text_has_no_bound_of_its_own() -> None:
    assert parse(b'{"text":"' + b"word " * 6_000_000 + b'"}')


@given(VALUES)
def test_pieces_of_a_large_body_are_the_json_of_a_small_one(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_PIECE_BYTES", 16)
        patch.setattr(strict_json, "_WHOLE_BYTES", 0)
        assert b"".join(encode_body(value, 100)) == encode_json(value)
