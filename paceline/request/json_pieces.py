"""JSON in pieces, each from a short call into C, which nothing interrupts."""

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json

_PIECE_CHARS = 256 * 1024
_encode = functools.partial(to_json, inf_nan_mode="null")
T = TypeVar("T")


def json_bytes(value: object) -> int:
    """Return the size of a value's JSON; another thread than the main one gets large values."""
    if threading.get_ident() == threading.main_thread().ident:
        return len(_encode(value))
    return sum(map(len, encode_pieces(value)))


def encode_pieces(value: Any) -> Iterator[bytes]:
    """Yield the pieces of strict JSON, each from a short call."""
    if _room(value, _PIECE_CHARS) >= 0:
        yield _encode(value)
    elif isinstance(value, str):
        yield b'"'
        for at in range(0, len(value), _PIECE_CHARS):
            yield to_json(value[at : at + _PIECE_CHARS])[1:-1]
        yield b'"'
    else:
        named = isinstance(value, dict)
        mark, end = (b"{", b"}") if named else (b"[", b"]")
        for batch in _batches([*value.items()] if named else value):
            yield mark
            mark = b","
            if len(batch) > 1:
                yield _encode(dict(batch) if named else batch)[1:-1]
                continue
            one = batch[0]
            if named:
                yield to_json(one[0]) + b":"
                one = one[1]
            yield from encode_pieces(one)
        yield end


def _batches(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield short values together, and each long one by itself."""
    if len(values) == 1 or _room(values, _PIECE_CHARS) >= 0:
        yield values
    else:
        half = len(values) // 2
        yield from _batches(values[:half])
        yield from _batches(values[half:])


def _room(value: Any, room: int) -> int:
    """Return a number of characters less those of a value; below 0 if it takes more."""
    if isinstance(value, str):
        return room - len(value)
    if isinstance(value, dict):
        room -= sum(map(len, value))
        value = value.values()
    elif not isinstance(value, list | tuple):
        return room
    for one in value:
        room -= 8
        kind = type(one)
        if kind is str:
            room -= len(one)
        elif kind is not int and kind is not float:
            room = _room(one, room)
        if room < 0:
            break
    return room
