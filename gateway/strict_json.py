"""Strict JSON of requests, within bounds that keep each call into C short.

CPython runs one thread at a time, and a call into C is not interrupted: while it parses, encodes or
copies, no other request continues. So a body has bounds on values that are slow to parse, and a
large one is parsed and encoded piece by piece, into pieces that are never joined.
"""

import re
import secrets
from typing import Any

from pydantic_core import from_json, to_json

from gateway import errors
from gateway.types import Json, RawBody
from paceline.request.json_pieces import encode_pieces

_SMALL_BYTES = 4 * 1024
_SMALL_FOOTPRINT = 8
# Measured with CPython 3.11: an object takes 80 to 190 bytes when it is parsed, and a value that is
# no container up to 64. A text takes as many bytes for each character as its widest one.
_CONTAINER_BYTES, _VALUE_BYTES = 160, 64
_CHUNK_BYTES = 1024 * 1024
_WHOLE_BYTES = 512 * 1024
"""Of a body that one call parses or encodes."""
_PIECE_BYTES = 256 * 1024
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
_WIDE_TEXT_CHARS_LIMIT = 8 * 1024 * 1024
"""Of one non-ASCII text: each character takes as much memory as the widest one."""
_LIST, _OBJECT, _QUOTE = b'[{"'
_CLOSING = dict(zip(b"[{", b"]}", strict=True))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SLOT = secrets.token_hex(16)
"""Stands in a piece for the content of the next ones; no client can know it."""
_BEFORE = f"{_SLOT}0"
"""Names the content of the earlier pieces."""
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]..")
_SURROGATE = b"\\ud"
_ESCAPE_BYTES = 6
_UTF8_BYTES = 4
Pieces = tuple[bytes, ...]
"""A body, which is sent without one copy of all of it."""


def footprint_bytes(raw: RawBody, *, bounded: bool = False) -> int:
    """Estimate the memory that JSON takes: parsed, translated, and written again and sent.

    With `bounded` raise `BodyNotJson` for a text that would take long to parse.
    """
    size_bytes = len(raw)
    if size_bytes <= _SMALL_BYTES:
        return _SMALL_FOOTPRINT * size_bytes
    width, wide_bytes, counts = 1, 0, [0] * len(_BOUNDS)
    for begin in range(0, size_bytes, _CHUNK_BYTES):
        chunk = raw[begin : begin + _CHUNK_BYTES + len(_SURROGATE)]  # with marks that are cut
        for place, (marks, limit, name) in enumerate(_BOUNDS):
            counts[place] += sum([chunk.count(mark, 0, _CHUNK_BYTES) for mark in marks])
            if bounded and counts[place] > limit:
                raise errors.BodyNotJson(f"The body may contain at most {limit:,} {name}.")
        wide = not chunk.isascii()
        if wide:
            wide_bytes += len(chunk.translate(None, _ASCII))
        if wide or b"\\u" in chunk:
            width = max(width, 4 if b"\xf0" in chunk or _SURROGATE in chunk else 2)
    if bounded and wide_bytes > _WIDE_BYTES_LIMIT:
        raise errors.BodyNotJson(
            f"The body may contain at most {_WIDE_BYTES_LIMIT:,} bytes of non-ASCII characters."
        )
    containers, values, _ = counts
    parsed_bytes = 2 * _CONTAINER_BYTES * containers + _VALUE_BYTES * values
    return (width + 2) * size_bytes + parsed_bytes


def parse(raw: RawBody) -> dict[str, Any]:
    """Parse one strict JSON object: UTF-8, no NaN, no infinity, bounded depth; or `BodyNotJson`.

    Of a body whose footprint is known, and whose values are therefore bounded.
    """
    try:
        # The client's own bytes are never passed on: a duplicate key could mean one thing to the
        # gateway and another to the worker. The worker's body is encoded from this parse.
        body = _parse(raw)
    except ValueError:
        raise errors.BodyNotJson from None
    if not isinstance(body, dict):
        raise errors.BodyNotJson
    return body


def parse_answer(raw: RawBody) -> Any:
    """Parse the strict JSON of a worker, of as many values as it has; raise `ValueError`."""
    try:
        return _parse(raw)
    except errors.BodyNotJson as error:
        raise ValueError from error


def _parse(raw: RawBody) -> Any:
    return _PieceParser(raw).parse() if len(raw) > _WHOLE_BYTES else _from_json(raw)


def _from_json(raw: RawBody) -> Any:
    return from_json(raw, allow_inf_nan=False)


class _PieceParser:
    """Parses a large text by short calls, to what one long call would return.

    A piece ends before a comma, or before a long text, whose own pieces follow. Open brackets are
    closed behind the piece, and opened again before the next one. A slot at both places keeps a
    comma from standing where no value is.
    """

    def __init__(self, raw: RawBody) -> None:
        self._raw = raw
        self._open: list[Any] = []
        """The objects and lists that are open, the outermost first."""

    def parse(self) -> Any:
        """Return the value of the text; raise `ValueError`, or `BodyNotJson` with the bound."""
        begin, root, marks = 0, None, b""
        while True:
            end, outside = self._piece(begin)
            head = _head(marks)
            marks, kept = _follow(marks, outside)
            if end == len(self._raw):
                self._merge(piece := _from_json(head + self._raw[begin:]))
                return piece if root is None else root
            if not marks:
                raise ValueError
            before_text = self._raw[end] == _QUOTE
            tail = _tail(marks, before_text=before_text)
            piece = _from_json(head + self._raw[begin:end] + tail)
            path = _path(piece, marks)
            place = _slot(path[-1])
            root = piece if root is None else root
            self._merge(piece)
            self._open[kept:] = path[kept:]
            if before_text:
                self._open[-1][place], begin = self._text(end + 1)
            else:
                del self._open[-1][place]
                begin = end

    def _piece(self, begin: int) -> tuple[int, bytes]:
        """Return where the piece that begins here ends, and its bytes outside texts."""
        size = _PIECE_BYTES
        while True:
            parts = self._unescaped(begin, size).split(b'"')
            if begin + size >= len(self._raw):
                return len(self._raw), b"".join(parts[::2])
            end = begin + size
            for index in reversed(range(len(parts))):
                end -= len(parts[index])
                comma = -1 if index % 2 else parts[index].rfind(b",")
                if comma >= 0 and end + comma > begin:
                    return end + comma, b"".join((*parts[:index:2], parts[index][:comma]))
                end -= 1
            if len(parts) % 2 == 0 and len(parts[-1]) > size // 2:  # longer than any name
                return begin + size - len(parts[-1]) - 1, b"".join(parts[::2])
            size *= 2

    def _unescaped(self, begin: int, size: int) -> bytes:
        """Return the bytes of the text with only the quotes that begin or end a text."""
        chunk = self._raw[begin : begin + size]
        return bytes(chunk.replace(rb"\\", rb"\.").replace(rb"\"", rb"\."))

    def _merge(self, piece: Any) -> None:
        """Add a piece to the open values."""
        for value in self._open:
            if isinstance(value, list):
                before = piece[0]
                value.extend(piece[1:])
            else:
                before = piece.pop(_BEFORE)
                value.update(piece)
            piece = before

    def _text(self, begin: int) -> tuple[str, int]:
        """Return the long text that begins here, and where its closing quote ends."""
        text = ""
        while True:
            chunk = self._unescaped(begin, _PIECE_BYTES)
            end = chunk.find(b'"')
            closed = end >= 0
            if not closed:
                if begin + _PIECE_BYTES >= len(self._raw):
                    raise ValueError
                end = _cut(chunk)
            piece = _from_json(b'"' + self._raw[begin : begin + end] + b'"')
            wide = not (text.isascii() and piece.isascii())
            if wide and len(text) + len(piece) > _WIDE_TEXT_CHARS_LIMIT:
                raise errors.BodyNotJson(
                    f"A non-ASCII text may have at most {_WIDE_TEXT_CHARS_LIMIT:,} characters."
                )
            # CPython extends the text in place; a join would copy all of it in one call.
            text += piece
            begin += end + closed
            if closed:
                return text, begin


def _cut(chunk: bytes) -> int:
    """Return where a piece of a text may end: behind a whole character, and a pair of escapes."""
    end = len(chunk) - 1
    if (escape := chunk.rfind(b"\\", end - _ESCAPE_BYTES)) >= 0:
        end = escape
    for _ in range(_UTF8_BYTES - 1):
        end -= chunk[end] & 0xC0 == 0x80
    if _HIGH_SURROGATE.match(chunk, end - _ESCAPE_BYTES):
        end -= _ESCAPE_BYTES
    return end


def _follow(marks: bytes, outside: bytes) -> tuple[bytes, int]:
    """Follow brackets; return the open ones, and how many stayed open all the time."""
    kept, found = len(marks), bytearray(marks)
    for mark in outside.translate(None, _NO_BRACKETS):
        if mark in b"[{":
            found.append(mark)
        elif not found or _CLOSING[found.pop()] != mark:
            raise ValueError
        kept = min(kept, len(found))
    return bytes(found), kept


def _head(marks: bytes) -> bytes:
    """Return text that opens brackets again, as if each had a value already."""
    opening = {_LIST: b"[", _OBJECT: b'{"%b":' % _BEFORE.encode()}
    return b"".join(opening[mark] for mark in marks) + b"0" * bool(marks)


def _tail(marks: bytes, *, before_text: bool) -> bytes:
    """Return a slot, and text that closes brackets."""
    slot = b'"%b"' % _SLOT.encode()
    if not before_text:
        slot = b"," + slot if marks[-1] == _LIST else b",%b:%b" % (slot, slot)
    return slot + bytes(_CLOSING[mark] for mark in reversed(marks))


def _path(value: Any, marks: bytes) -> list[Any]:
    """Return the values from a piece to the innermost open one, which has a slot; none if absent.

    After a duplicate name the last value of an object is not its last one in order.
    """
    if not isinstance(value, list if marks[0] == _LIST else dict):
        return []
    if not (inner := marks[1:]):
        return [] if _slot(value) is None else [value]
    children = value[-1:] if isinstance(value, list) else reversed(value.values())
    return next(([value, *path] for child in children if (path := _path(child, inner))), [])


def _slot(value: Any) -> Any:
    """Return the place of a slot in a list or an object."""
    if isinstance(value, list):
        return -1 if value and value[-1] == _SLOT else None
    return next((name for name, one in reversed(value.items()) if one == _SLOT), None)


def objects_of(values: object) -> list[Json]:
    """Return the objects of a list; none if it is no list."""
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def encode_json(value: object) -> bytes:
    """Return strict JSON: a number too large for a float reads as infinite, and becomes null."""
    return to_json(value, inf_nan_mode="null")


def encode_body(fields: object, size_bytes: int) -> Pieces:
    """Return strict JSON of about this size; a large one from many short calls."""
    if size_bytes <= _WHOLE_BYTES:
        return (encode_json(fields),)
    return tuple(encode_pieces(fields))


def encode_text(value: object) -> str:
    """Return strict JSON as a text, from short calls."""
    text = ""
    for piece in encode_pieces(value):
        text += piece.decode()
    return text


def size_of(pieces: Pieces) -> int:
    """Return the size of a body in bytes."""
    return sum(map(len, pieces))


def with_fields(pieces: Pieces, *fields: bytes) -> Pieces:
    """Return the body of an object with more fields at its end."""
    return (*pieces[:-1], b"%b,%b}" % (pieces[-1][:-1], b",".join(fields)))
