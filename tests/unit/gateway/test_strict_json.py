"""Strict JSON of requests: its bounds, and the pieces of large texts."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from gateway import strict_json
from gateway.errors import BodyNotJson
from gateway.strict_json import encode_body, encode_json, footprint_bytes, parse
from paceline.request import json_pieces
from tests.support.json_values import VALUES

TEXT_PIECES = st.sampled_from(
    ["a" * 40, r"\"", r"\\", r"\n", r"\ud83d\ude00", "[,]", "{:}", "\u20ac"]
)
JSON_TEXTS: st.SearchStrategy[str] = st.recursive(
    st.lists(TEXT_PIECES, max_size=6).map(lambda parts: '"' + "".join(parts) + '"')
    | st.sampled_from(["-1.5", "null", "[]", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=5).map(lambda items: f"[{', '.join(items)}]")
        | st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=5).map(
            lambda fields: "{" + ",".join(f'"{name}" :{one}' for name, one in fields) + "}"
        )
    ),
    max_leaves=20,
)
"""Names occur several times in an object."""


@pytest.mark.parametrize(
    ("item", "most", "name"),
    [
        (b"[],", 100_000 - 2, "100,000 objects and lists"),
        (b'"{",', 100_000 - 2, "100,000 objects and lists"),
        (b"1,", 1_000_000, "1,000,000 values"),
        (rb'"\n\n\n\n\n",', 300_000, "1,500,000 escaped characters"),
        ('"' + "\u20ac" * 1000 + '",', 4194, "12,582,912 bytes of non-ASCII characters"),
    ],
    ids=["lists", "braces in texts", "numbers", "escapes", "wide characters"],
)
def test_c16_a_body_has_bounds_on_what_is_slow_to_parse(item, most, name) -> None:
    """They count text too: telling it from structure would take as long as parsing."""
    one = item if isinstance(item, bytes) else item.encode()

    def body(count: int) -> bytes:
        return b'{"metadata":[' + one * count + b"1]}"

    assert footprint_bytes(body(most), bounded=True) == footprint_bytes(body(most))
    assert len(parse(body(most))["metadata"]) == most + 1
    with pytest.raises(BodyNotJson, match=f"at most {name}"):
        footprint_bytes(body(most + 1), bounded=True)
    assert footprint_bytes(body(most + 1)), "of an answer or a record"


def test_a_long_plain_text_has_no_bound_of_its_own() -> None:
    assert parse(b'{"text":"' + b"word " * 6_000_000 + b'"}')


@given(VALUES)
def test_pieces_of_a_large_body_are_the_json_of_a_small_one(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "_PIECE_CHARS", 16)
        patch.setattr(strict_json, "_WHOLE_BYTES", 0)
        assert b"".join(encode_body(value, 100)) == encode_json(value)


@given(JSON_TEXTS, st.integers(min_value=0), st.sampled_from([None, "", *'[]{},:"\\ 1']))
def test_a_large_body_is_parsed_as_a_small_one(text: str, at: int, other: str | None) -> None:
    raw = f'{{"a":{text}}}'.encode()
    if other is not None:
        at %= len(raw)
        raw = raw[:at] + other.encode() + raw[at + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "_PIECE_BYTES", 24)
        patch.setattr(strict_json, "_WHOLE_BYTES", 0)
        try:
            whole = from_json(raw, allow_inf_nan=False)
        except ValueError:
            whole = None
        if isinstance(whole, dict):
            assert to_json(parse(raw)) == to_json(whole), "with the order of the fields"
        else:
            with pytest.raises(BodyNotJson):
                parse(raw)


@pytest.mark.parametrize(
    "value",
    [
        "word " * 800_000,
        "word " * 800_000 + "\u20ac",
        "\u20ac" * 1_000_000,
        '"}' * 700_000,
        [1.5] * 500_000,
        [{"text": "x"}] * 45_000,
        ["x" * 100_000] * 40,
        {f"{number}" * 10_000: "x" for number in range(100, 200)},
        [[["x" * 100] * 10] * 10] * 40,
    ],
    ids=lambda value: type(value).__name__,
)
def test_c16_no_call_takes_megabytes_of_a_large_body(value, monkeypatch) -> None:
    """Else it would hold up other requests, as no other thread runs meanwhile."""
    sizes: list[int] = []

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(given: Any, **options: Any) -> Any:
            result = function(given, **options)
            sizes.extend(len(one) for one in (given, result) if isinstance(one, bytes | bytearray))
            return result

        return call

    body = {"messages": [{"role": "user", "content": value}, value]}
    raw = json.dumps(body, ensure_ascii=False).encode()
    monkeypatch.setattr(strict_json, "from_json", measured(from_json))
    monkeypatch.setattr(strict_json, "to_json", measured(to_json))
    monkeypatch.setattr(json_pieces, "to_json", measured(to_json))
    monkeypatch.setattr(json_pieces, "_encode", measured(json_pieces._encode))
    parsed = parse(bytearray(raw))
    assert parsed == body
    assert json.loads(b"".join(encode_body(parsed, len(raw)))) == body
    assert max(sizes) < 1024 * 1024


def test_a_long_text_beyond_ascii_has_a_bound() -> None:
    """One wide character makes each of a text take as much memory as itself."""
    text = "x" * (8 * 1024 * 1024 - 1)
    assert parse(f'{{"text":"{text}\u20ac"}}'.encode())
    with pytest.raises(BodyNotJson, match="8,388,608 characters"):
        parse(f'{{"text":"{text}x\u20ac"}}'.encode())
