"""The arguments of tool calls, rewritten as JSON while a model writes them.

Most models write JSON, which passes unchanged; Python's and Gemma's literals,
and texts between tags, become JSON on the way. So a marker within a string ends nothing, one
outside of strings ends the arguments, and arguments that a limit cuts are valid up to there.
Between tags, what is no value of its type is a text.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Final

import regex
from pydantic_core import from_json

from workers.engine.text.detokenizer import overlap
from workers.engine.text.schema_rewrite import resolve
from workers.engine.text.tool_formats import Tags
from workers.server.engines import Json

_MAX_REFERENCES: Final = 16
"""Longest chain of `$ref`; a chain as long as the body allows would exhaust the stack."""
_WORD: Final = re.compile(r"[^\s\[\]{}(),:=\"']+")
_RUN: Final = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_ESCAPE_CHARS: Final = {"u": 6, "U": 10, "x": 4}
"""Length of the escapes that have not two characters."""
_JSON_ESCAPE: Final = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_PYTHON_ESCAPE: Final = re.compile(r"\\(?:U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2}))")
_LETTER_ESCAPES: Final = {"'": "'", "\n": "", "a": r"\u0007", "v": r"\u000b", "0": r"\u0000"}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_JSON_WORD: Final = re.compile(
    r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
)
_TYPES: Final = {
    "string": ("str", "text", "varchar", "char", "enum"),
    "boolean": ("bool", "binary"),
    "number": ("num", "float", "double"),
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "object": ("obj", "dict", "map"),
    "array": ("arr", "list"),
    "null": ("null",),
}
"""JSON's types, by the beginnings of names that clients have for them."""
_NUMBER = frozenset({"number", "integer"})
_TYPES_OF: Final = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: _NUMBER,
    float: _NUMBER,
    str: frozenset({"string"}),
    list: frozenset({"array"}),
}
_ANY: Final[frozenset[str]] = frozenset()
"""The types of a value without a known type."""


class LiteralReader:
    """Rewrites one literal as JSON: of JSON itself, of Python or of Gemma's notation."""

    def __init__(self, quote: str = "", stop: regex.Pattern[str] | None = None) -> None:
        self._mark = quote
        """Text around strings in Gemma's notation."""
        self._stop = stop
        """Markup that no literal contains outside of its strings: it ends an open one."""
        self._missing = ""
        """Text that completes the last key of an object."""
        self._buffer = ""
        self._at = 0
        """Place in the buffer."""
        self._begun = self._ended = False
        self._open: list[str] = []
        """Text that closes the open brackets in JSON."""
        self._string = ""
        """Text that closes the open string; empty outside of strings."""
        self._key = False
        """Whether a key comes next."""
        self._held = ""
        """White space, and a comma that nothing may follow in JSON."""
        self._text: list[str] | None = None
        """Parts of a string that holds the arguments, as some models write them."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return its JSON, and the text after the literal once it is complete."""
        self._buffer += text
        out: list[str] = []
        rest = None
        while rest is None and self._at < len(self._buffer):
            piece = self._in_string() if self._string else self._between_strings()
            if piece is None:
                break
            out.append(piece)
            if self._ended or (self._begun and not self._open and not self._string):
                rest = self._buffer[self._at :]
        self._buffer, self._at = self._buffer[self._at :], 0
        if self._text is None:
            literal = "".join(out)
            return ("{}" if rest is not None and literal in ("null", '""') else literal), rest
        self._text += out
        literal = "" if rest is None else "".join(self._text)
        with contextlib.suppress(ValueError):  # half a surrogate pair
            literal = literal and (str(from_json(literal)).strip() or "{}")
        return literal, rest

    def close(self) -> str:
        """Return nothing: anything that the model left open stays open."""
        return "" if self._begun else "{}"

    def _take(self, length: int) -> str:
        taken = self._buffer[self._at : self._at + length]
        self._at += length
        return taken

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held

    def _between_strings(self) -> str | None:
        """Rewrite the next token outside of strings; None if it needs more text."""
        letter, mark = self._buffer[self._at], self._mark
        stop = self._stop and self._stop.match(self._buffer, self._at, partial=True)
        if stop or (letter in "}])" and not self._begun):
            return None if stop and stop.partial else self._end()
        if mark and mark.startswith(coming := self._buffer[self._at : self._at + len(mark)]):
            return self._begin_string(mark) if coming == mark else None
        if letter in "\"'":
            if not self._begun:
                self._text = []
            return self._begin_string(letter)
        if letter not in "{[(}]),:=" and not letter.isspace():
            return self._word()
        self._take(1)
        if letter.isspace():
            self._held += letter if self._begun else ""
            return ""
        return self._separator(letter) if letter in ",:=" else self._bracket(letter)

    def _end(self) -> str:
        """Close open parts, because markup follows; a part that has not begun is empty."""
        closers = "".join(reversed(self._open))
        literal = self._missing + closers if self._begun else "{}"
        self._open.clear()
        self._ended = True
        return literal

    def _separator(self, letter: str) -> str:
        if letter == ",":
            self._held, self._key = ",", self._open[-1:] == ["}"]
            return ""
        if self._key:
            self._missing = "null"
        self._key = False
        return self._release() + (":" if letter == ":" else ": ")

    def _bracket(self, letter: str) -> str:
        if letter in "{[(":
            # Arguments in parentheses have names; within them, parentheses are Python's tuples.
            named = letter == "{" or (letter == "(" and not self._begun)
            self._begun, self._key, self._missing = True, named, ""
            self._open.append("}" if named else "]")
            return self._release() + ("{" if named else "[")
        held, self._held, self._key = self._held, "", False
        closed, self._missing = self._missing + self._open.pop(), ""
        return closed if held.startswith(",") else held + closed

    def _word(self) -> str | None:
        found = _WORD.match(self._buffer, self._at)
        assert found is not None, "every other letter has been handled"
        word = found[0]
        if self._mark and self._mark[0] in word[1:]:
            word = word[: word.index(self._mark[0], 1)]
        if self._stop:
            stop = self._stop.search(self._buffer, self._at, partial=True)
            if stop and stop.start() < self._at + len(word):
                if stop.partial:
                    return None
                word = self._buffer[self._at : stop.start()]
        if self._at + len(word) == len(self._buffer):
            return None
        self._take(len(word))
        self._begun = True
        word = _WORDS.get(word, word)
        is_json = not self._key and _JSON_WORD.fullmatch(word)
        self._missing = ": null" if self._key else ""
        return self._release() + (word if is_json else _quote(word))

    def _begin_string(self, mark: str) -> str:
        self._take(len(mark))
        self._begun, self._string = True, mark
        self._missing = ": null" if self._key else ""
        return self._release() + '"'

    def _in_string(self) -> str | None:
        """Rewrite the next part of a string; None if it needs more text."""
        if self._string == self._mark:
            return self._in_marked_string()
        letter = self._buffer[self._at]
        if letter == self._string:
            self._take(1)
            self._string = ""
            return '"'
        if letter == "\\":
            return self._escape()
        run = _RUN[self._string].match(self._buffer, self._at)
        return self._take(len(run[0])) if run else _escaped(self._take(1))

    def _in_marked_string(self) -> str | None:
        mark = self._mark
        end = self._buffer.find(mark, self._at)
        if end == self._at:
            self._take(len(mark))
            self._string = ""
            return '"'
        if end < 0:
            end = len(self._buffer) - overlap(self._buffer[self._at :], mark)
        return _escaped(self._take(end - self._at)) if end > self._at else None

    def _escape(self) -> str | None:
        kind = self._buffer[self._at + 1 : self._at + 2]
        length = _ESCAPE_CHARS.get(kind, 2)
        escape = self._buffer[self._at : self._at + length]
        if len(escape) < length:
            return None
        if _JSON_ESCAPE.fullmatch(escape):
            return self._take(length)
        char = _PYTHON_ESCAPE.fullmatch(escape)
        if char and (code := int(char[1] or char[2], 16)) <= sys.maxunicode:
            self._take(length)
            return json.dumps(chr(code))[1:-1]
        self._take(2)
        return _LETTER_ESCAPES.get(kind, "\\\\" + _escaped(kind))


class TagReader:
    """Rewrites texts between tags as a JSON object, each by the type of its argument."""

    def __init__(
        self, tags: Tags, tail: regex.Pattern[str], end: str, types: Mapping[str, frozenset[str]]
    ) -> None:
        self._tags = tags
        self._tail = tail
        self._types = types
        self._key = regex.compile(tags.key)
        # What ends a value may stand within it too, so what follows it must be markup as well.
        following = "|".join(filter(None, (tags.key, tail.pattern, re.escape(end))))
        self.stop = regex.compile(
            f"(?:{re.escape(tags.wrap[1])})?{re.escape(tags.end)}(?=\\s*(?:{following}))"
        )
        self._null = regex.compile(f"(?i:null){self.stop.pattern}")
        self._buffer = ""
        self._step: Callable[[], str | None] = self._next_key
        self._wanted = _ANY
        """Types of the value that is being read."""
        self._searched = 0
        """Length of the beginning of the buffer in which a held value does not end."""
        self._first = True
        self._done = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return its JSON, and the text after the arguments once they are complete."""
        self._buffer += text
        out: list[str] = []
        while not self._done:
            piece = self._step()
            if piece is None:
                return "".join(out), None
            out.append(piece)
        rest, self._buffer = self._buffer, ""
        return "".join(out), rest

    def close(self) -> str:
        """Return the rest of the JSON of arguments that the model did not end."""
        ended = ""
        if self._step == self._text_value:
            ended = '"'
        elif self._step in (self._begin_value, self._held_value):
            stop = self.stop.search(self._buffer, partial=True)
            ended = _value_of(self._buffer[: stop.start()], self._wanted)
        return ended + ("{}" if self._first else "}")

    def _next_key(self) -> str | None:
        key = self._key.match(self._buffer, partial=True)
        if key and not key.partial:
            self._buffer = self._buffer[key.end() :]
            groups = key.groupdict()
            name = groups["key"].strip()
            self._wanted = self._types.get(name, _ANY)
            if groups.get("string") in ("true", "string"):
                self._wanted = frozenset({"string"})
            elif groups.get("string"):
                self._wanted -= {"string"}
            before, self._first = "{" if self._first else ", ", False
            self._step = self._begin_value
            return f"{before}{_quote(name)}: "
        tail = self._tail.match(self._buffer, partial=True)
        if key or (tail and tail.partial):
            return None
        if tail:
            self._buffer = self._buffer[tail.end() :]
        self._done = True
        return "{}" if self._first else "}"

    def _begin_value(self) -> str | None:
        """Decide by its type how to read a value: a text as it arrives, any other as a whole."""
        value, wrap = self._buffer, self._tags.wrap[0]
        if wrap and wrap.startswith(value[: len(wrap)]):
            if len(value) < len(wrap):
                return None
            value = value[len(wrap) :]
        text = self._wanted == {"string"}
        if self._wanted == {"string", "null"}:
            null = self._null.match(value, partial=True)
            if null and null.partial:
                return None
            text = null is None
        self._buffer = value
        if text:
            self._step = self._text_value
            return '"'
        self._searched, self._step = 0, self._held_value
        return ""

    def _text_value(self) -> str | None:
        stop = self.stop.search(self._buffer, partial=True)
        text, self._buffer = self._buffer[: stop.start()], self._buffer[stop.start() :]
        if stop.partial:
            return _escaped(text) if text else None
        self._end_value(stop.end() - stop.start())
        return _escaped(text) + '"'

    def _held_value(self) -> str | None:
        stop = self.stop.search(self._buffer, self._searched, partial=True)
        if stop.partial:
            self._searched = stop.start()
            return None
        value = _value_of(self._buffer[: stop.start()], self._wanted)
        self._end_value(stop.end())
        return value

    def _end_value(self, at: int) -> None:
        self._buffer = self._buffer[at:]
        self._step = self._next_key


ArgumentsReader = LiteralReader | TagReader


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return text as a part of a JSON string."""
    return _quote(text)[1:-1]


def _value_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument that may be no text: its own, Python's, else the text's."""
    stripped = text.strip()
    for candidate in (stripped, _python_as_json(stripped)):
        try:
            value = from_json(candidate, allow_inf_nan=False)
        except ValueError:
            continue
        if isinstance(value, float) and not isfinite(value):
            continue
        if not types or _type_of(value) & types:
            return candidate
    return _quote(text)


def _python_as_json(text: str) -> str:
    """Return the JSON of a literal of Python; empty for any other text."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""


def _type_of(value: Json) -> frozenset[str]:
    """Return the JSON types of a value; a whole number is an integer and a number."""
    return _TYPES_OF.get(type(value), frozenset({"object"}))


def argument_types(function: Mapping[str, Json] | None) -> dict[str, frozenset[str]]:
    """Return the types that each argument of a function may have; empty where none is known."""
    parameters = (function or {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {name: _types_of(schema, parameters) for name, schema in properties.items()}


def _types_of(schema: Json, root: Json, references: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or references > _MAX_REFERENCES:
        return _ANY
    if "$ref" in schema:
        return _types_of(resolve(schema["$ref"], root), root, references + 1)
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        plain = [str(name).strip().lower() for name in names]
        return frozenset(
            kind for kind, begins in _TYPES.items() for one in plain if one.startswith(begins)
        )
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(keyword), list) and choices:
            each = [_types_of(choice, root, references + 1) for choice in choices]
            return frozenset().union(*each) if all(each) else _ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset().union(*map(_type_of, values)) if isinstance(values, list) else _ANY
