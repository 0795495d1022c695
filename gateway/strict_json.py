"""Strict JSON of requests, within bounds that keep each call into C short.

CPython runs one thread at a time, and a call into C is not interrupted: while it parses or encodes,
no other request goes on. So a body has bounds on what is slow to parse, and long texts are encoded
in pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

from gateway import errors

_UNCHECKED_BYTES = 64 * 1024
_SMALL_BYTES = 4 * 1024
_SMALL_FOOTPRINT = 8
# Measured with CPython 3.11: an object takes 80 to 190 bytes when it is parsed, and a value that is
# no container up to 64. A text takes as many bytes for each character as its widest one.
_CONTAINER_BYTES, _VALUE_BYTES = 160, 64
_CHUNK_BYTES = 1024 * 1024
_PIECE_CHARS = 1024 * 1024
_ASCII = bytes(range(128))
_BOUNDS = (
    # An empty list takes two bytes of a body and seventy when it is parsed.
    (b"{[", 100_000, "objects and lists"),
    (b",", 1_000_000, "values"),
    (b"\\", 1_500_000, "escaped characters"),
)
ITEMS_LIMIT = 10_000
"""The messages or items of one request, and the items of a conversation."""
_WIDE_BYTES_LIMIT = 12 * 1024 * 1024
"""Of characters beyond ASCII; four million of most scripts."""


def footprint_bytes(raw: bytes) -> int:
    """Estimate the memory that JSON takes: parsed, translated, and written again and sent."""
    size_bytes = len(raw)
    if size_bytes <= _SMALL_BYTES:
        return _SMALL_FOOTPRINT * size_bytes
    width = 1
    if b"\\u" in raw or not raw.isascii():
        width = 4 if b"\xf0" in raw or b"\\ud" in raw else 2
    containers = raw.count(b"{") + raw.count(b"[")
    parsed_bytes = 2 * _CONTAINER_BYTES * containers + _VALUE_BYTES * raw.count(b",")
    return (width + 2) * size_bytes + parsed_bytes


def parse(raw: bytes) -> dict[str, Any]:
    """Parse one strict JSON object: UTF-8, no NaN, no infinity, bounded depth and values.

    Raise `BodyNotJson`.
    """
    if len(raw) > _UNCHECKED_BYTES:
        check_bounds(raw)
    try:
        # The client's own bytes are never passed on: a duplicate key could mean one thing to the
        # gateway and another to the worker. The worker's body is encoded from this parse.
        body = from_json(raw, allow_inf_nan=False)
    except ValueError:
        raise errors.BodyNotJson from None
    if not isinstance(body, dict):
        raise errors.BodyNotJson
    return body


def check_bounds(raw: bytes) -> None:
    """Raise `BodyNotJson` for a text that would take long to parse."""
    counts = [0] * len(_BOUNDS)
    wide_bytes = 0
    for begin in range(0, len(raw), _CHUNK_BYTES):
        chunk = raw[begin : begin + _CHUNK_BYTES]
        for place, (marks, limit, name) in enumerate(_BOUNDS):
            counts[place] += sum(map(chunk.count, marks))
            if counts[place] > limit:
                raise errors.BodyNotJson(f"The body may have at most {limit:,} {name}.")
        if not chunk.isascii():
            wide_bytes += len(chunk.translate(None, _ASCII))
    if wide_bytes > _WIDE_BYTES_LIMIT:
        raise errors.BodyNotJson(
            f"The body may have at most {_WIDE_BYTES_LIMIT:,} bytes of characters beyond ASCII."
        )


def encode_json(value: object) -> bytes:
    """Return strict JSON: a number too large for a float reads as infinite, and becomes null."""
    return to_json(value, inf_nan_mode="null")


def encode_body(fields: object, size_bytes: int) -> bytes:
    """Return strict JSON of about this size; a large one from many short calls."""
    if size_bytes <= _PIECE_CHARS // 2:
        return encode_json(fields)
    return b"".join(encode_pieces(fields))


def encode_pieces(value: object) -> Iterator[bytes]:
    """Yield the pieces of strict JSON, each from a short call."""
    match value:
        case str() if len(value) > _PIECE_CHARS:
            yield b'"'
            for at in range(0, len(value), _PIECE_CHARS):
                yield to_json(value[at : at + _PIECE_CHARS])[1:-1]
            yield b'"'
        case list() | tuple() if not all(map(_is_short, value)):
            mark = b"["
            for one in value:
                yield mark
                yield from encode_pieces(one)
                mark = b","
            yield b"]"
        case dict() if not all(map(_is_short, value.values())):
            mark = b"{"
            for name, one in value.items():
                yield b"%b%b:" % (mark, to_json(name))
                yield from encode_pieces(one)
                mark = b","
            yield b"}"
        case _:
            yield encode_json(value)


def _is_short(value: object) -> bool:
    """Return whether a value is no container, and no long text."""
    return not isinstance(value, dict | list | tuple) and not (
        isinstance(value, str) and len(value) > _PIECE_CHARS // 8
    )
