"""Tool calls in generated text: found and read while the text arrives.

A call begins as soon as its function is known, and its arguments follow as the model writes them,
as parts of one JSON text. What the model writes is JSON in most families and is passed on as it is;
Python's and Gemma's literals, and texts between tags, become JSON on the way. So a marker within a
string ends nothing, and a call that a limit cuts has the arguments up to there.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Final, Protocol

import regex
from mlx_vlm.tools import load_tool_module
from pydantic_core import from_json

from workers.engine.tool_formats import Call, Tags, ToolFormat
from workers.server.ports import Json

ToolCall = dict[str, Json]
"""One call of a function in OpenAI's format, its arguments as JSON text."""

_LETTERS: Final = string.ascii_letters + string.digits
_MAX_REFERENCES: Final = 16
"""Longest chain of `$ref`; a chain as long as the body allows would exhaust the stack."""
_PARSE_ERRORS: Final = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,  # raised by Python's own parser for deeply nested values
)
"""Errors of mlx-vlm's parsers for text that only looks like a tool call."""

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
_ANY: Final[frozenset[str]] = frozenset()
"""The types of a value without a known type."""


class ArgumentsText(str):
    """More of the arguments of the latest call."""

    __slots__ = ()


class _Reader(Protocol):
    """A reader of arguments."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return its JSON, and what follows the arguments once they are complete."""

    def close(self) -> str:
        """Return what is left of the JSON of arguments that the model did not end."""


class LiteralReader:
    """Rewrites one literal as JSON: of JSON itself, of Python or of Gemma's notation."""

    def __init__(self, quote: str = "") -> None:
        self._mark = quote
        """Text around strings in Gemma's notation."""
        self._buffer = ""
        self._at = 0
        """Place in the buffer."""
        self._begun = False
        self._open: list[str] = []
        """What closes the open brackets in JSON."""
        self._string = ""
        """What closes the open string; empty outside of strings."""
        self._key = False
        """Whether a key comes next."""
        self._held = ""
        """White space, and a comma that nothing may follow in JSON."""
        self._text: list[str] | None = None
        """Parts of a string that holds the arguments, as some models write them."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return its JSON, and what follows the literal once it is complete."""
        self._buffer += text
        out: list[str] = []
        rest = None
        while rest is None and self._at < len(self._buffer):
            piece = self._in_string() if self._string else self._between_strings()
            if piece is None:
                break
            out.append(piece)
            if self._begun and not self._open and not self._string:
                rest = self._buffer[self._at :]
        self._buffer, self._at = self._buffer[self._at :], 0
        if self._text is not None:
            self._text += out
            return ("" if rest is None else _text_in("".join(self._text))), rest
        literal = "".join(out)
        return ("{}" if rest is not None and literal in ("null", '""') else literal), rest

    def close(self) -> str:
        """Return nothing: what the model left open stays open."""
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

    def _separator(self, letter: str) -> str:
        if letter == ",":
            self._held, self._key = ",", self._open[-1:] == ["}"]
            return ""
        self._key = False
        return self._release() + (":" if letter == ":" else ": ")

    def _bracket(self, letter: str) -> str:
        if letter in "{[(":
            # Arguments in parentheses have names; within them, parentheses are Python's tuples.
            named = letter == "{" or (letter == "(" and not self._begun)
            self._begun, self._key = True, named
            self._open.append("}" if named else "]")
            return self._release() + ("{" if named else "[")
        held, self._held, self._key = self._held, "", False
        closed = self._open.pop() if self._open else ""
        return closed if held.startswith(",") else held + closed

    def _word(self) -> str | None:
        found = _WORD.match(self._buffer, self._at)
        assert found is not None, "every other letter has been handled"
        word = found[0]
        if self._mark and self._mark[0] in word[1:]:
            word = word[: word.index(self._mark[0], 1)]
        if self._at + len(word) == len(self._buffer):
            return None
        self._take(len(word))
        self._begun = True
        word = _WORDS.get(word, word)
        is_json = not self._key and _JSON_WORD.fullmatch(word)
        return self._release() + (word if is_json else _quote(word))

    def _begin_string(self, mark: str) -> str:
        self._take(len(mark))
        self._begun, self._string = True, mark
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
            end = len(self._buffer) - _overlap(self._buffer[self._at :], mark)
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
        self._literal = LiteralReader()
        self._searched = 0
        """Length of the beginning of the buffer in which a held value does not end."""
        self._first = True
        self._done = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Add text; return its JSON, and what follows the arguments once they are complete."""
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
        """Return what is left of the JSON of arguments that the model did not end."""
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
        """Decide by its type, and for some types by its first letters, how to read a value."""
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
        elif self._wanted and "string" not in self._wanted and not value.strip():
            return None
        self._buffer = value
        if text:
            self._step = self._text_value
            return '"'
        if self._wanted and "string" not in self._wanted and value.lstrip()[0] in "{[":
            self._literal, self._step = LiteralReader(), self._literal_value
        else:
            self._searched, self._step = 0, self._held_value
        return ""

    def _text_value(self) -> str | None:
        stop = self.stop.search(self._buffer, partial=True)
        text, self._buffer = self._buffer[: stop.start()], self._buffer[stop.start() :]
        if stop.partial:
            return _escaped(text) if text else None
        self._end_value(stop.end() - stop.start())
        return _escaped(text) + '"'

    def _literal_value(self) -> str | None:
        json_text, rest = self._literal.feed(self._buffer)
        self._buffer = rest or ""
        if rest is not None:
            self._step = self._after_literal
            return json_text
        return json_text or None

    def _after_literal(self) -> str | None:
        stop = self.stop.search(self._buffer, partial=True)
        if stop.partial:
            self._buffer = self._buffer[stop.start() :]
            return None
        self._end_value(stop.end())
        return ""

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


class ToolCallSplitter:
    """Splits arriving text into content, calls as they begin, and their arguments.

    It holds back text that may begin a call.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Mapping[str, Json]] = (),
        *,
        limit: int | None = None,
    ) -> None:
        self._format = tool_format
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._declared = list(tools)
        self._limit = limit
        self._buffer = ""
        self._marked = False
        """Whether the marker of calls has been read; without one, only known functions are."""
        self._opening = ""
        """White space and the marker that precede what may be a call."""
        self._calls = 0
        self._call = Call("")
        self._reader: _Reader = LiteralReader()
        self._held: str | None = None
        """Arguments of a call whose name follows them; None for other calls."""
        self._step = self._begin if tool_format.opened else self._text

    def feed(self, text: str) -> list[str | ToolCall]:
        """Add text; return the content, calls and arguments that are certain now, in order."""
        self._buffer += text
        out: list[str | ToolCall] = []
        while self._step(out):
            pass
        return out

    def close(self, *, cut: bool = False) -> list[str | ToolCall]:
        """End the text; return what was held back.

        If a limit has `cut` off a call, its arguments end where they are, and a call without a name
        is left out: half of it is no text.
        """
        rest = self._buffer
        if self._step == self._arguments:
            return self._end_arguments(cut=cut)
        if self._step == self._next or (self._step == self._tail and self._held is None):
            return []
        if self._step == self._text:
            held = _overlap(rest, self._format.begin)
            if cut and (held > 1 or (held and self._calls)):
                rest = rest[:-held]
            # White space after a call separates it from the next; elsewhere it is content.
            return [rest] if rest and not (self._calls and not rest.strip()) else []
        if cut:
            return []
        ended = self.feed(self._format.end)
        if any(isinstance(piece, dict) for piece in ended):
            return ended
        text = self._opening + (self._held or "") + rest
        return [text] if text else []

    def _end_arguments(self, *, cut: bool) -> list[str | ToolCall]:
        out: list[str | ToolCall] = []
        if self._held is not None:
            return out if cut else [self._opening + self._held]
        self._write("" if cut else self._reader.close(), out)
        return out

    def _text(self, out: list[str | ToolCall]) -> bool:
        """Move the content before a call to `out`; return whether a call may begin."""
        begin = self._format.begin
        start = self._buffer.find(begin)
        found = start >= 0
        if not found:
            start = len(self._buffer) - _overlap(self._buffer, begin)
        text = self._buffer[:start].rstrip()
        if found:
            self._opening, self._marked = self._buffer[len(text) : start + len(begin)], True
            self._step = self._block if self._format.parser else self._begin
        self._buffer = self._buffer[start + len(begin) if found else len(text) :]
        if text:
            out.append(text)
        return found

    def _begin(self, out: list[str | ToolCall]) -> bool:
        """Read a call up to its arguments, or find that the text is no call."""
        plain = self._format.plain
        if plain and plain.startswith(self._buffer[: len(plain)]):
            if len(self._buffer) < len(plain):
                return False
            self._buffer, self._opening = self._buffer[len(plain) :], ""
        else:
            heads = [
                (call, call.head_pattern.match(self._buffer, partial=True))
                for call in self._format.calls
            ]
            for call, head in heads:
                if head and not head.partial and self._is_known(name := _name_of(head)):
                    self._buffer = self._buffer[head.end() :]
                    self._start(call, name, out)
                    return True
            if any(head and head.partial for _, head in heads):
                return False
        if self._opening:
            out.append(self._opening)
        self._step = self._text
        return True

    def _is_known(self, name: str | None) -> bool:
        return self._marked or name is None or name in self._tools or not self._tools

    def _start(self, call: Call, name: str | None, out: list[str | ToolCall]) -> None:
        self._call = call
        self._held = None if name is not None else ""
        self._calls += 1
        if call.tags is not None:
            types = _argument_types(self._tools.get(name or ""))
            self._reader = TagReader(call.tags, call.tail_pattern, self._format.end, types)
        else:
            self._reader = LiteralReader(self._format.quote)
        self._step = self._arguments
        if name is not None:
            self._write(_call(name, ""), out)
        if call.bare:
            self._write("{}", out)
            self._step = self._next

    def _arguments(self, out: list[str | ToolCall]) -> bool:
        arguments, rest = self._reader.feed(self._buffer)
        self._buffer = rest or ""
        self._write(arguments, out)
        if rest is None:
            return False
        # The tags of arguments end with their tail.
        self._step = self._next if self._call.tags else self._tail
        return True

    def _tail(self, out: list[str | ToolCall]) -> bool:
        tail = self._call.tail_pattern.match(self._buffer, partial=True)
        if tail and tail.partial:
            return False
        if tail:
            self._buffer = self._buffer[tail.end() :]
            name = _name_of(tail)
            if self._held is not None and name is not None:
                arguments, self._held = self._held, None
                self._write(_call(name, ""), out)
                self._write(arguments, out)
        self._step = self._next
        return True

    def _next(self, out: list[str | ToolCall]) -> bool:  # noqa: ARG002
        """Skip what stands between two calls; find the next one, or the end of all."""
        self._buffer = self._buffer.lstrip()
        for text in filter(None, (self._format.end, *self._format.skip)):
            if self._buffer.startswith(text):
                self._buffer = self._buffer[len(text) :]
                if text == self._format.end:
                    self._step = self._text
                return True
            if text.startswith(self._buffer):
                return False
        if self._buffer:
            self._opening, self._step = "", self._begin
        return bool(self._buffer)

    def _block(self, out: list[str | ToolCall]) -> bool:
        """Read calls as a whole by mlx-vlm's parser."""
        end = self._format.end
        at = self._buffer.find(end)
        if at < 0:
            return False
        block, self._buffer = self._buffer[:at], self._buffer[at + len(end) :]
        self._step = self._text
        calls = _parse(self._format.parser, block, self._declared)
        for call in calls:
            self._calls += 1
            self._write(call, out)
        if not calls:
            out.append(self._opening + block + end)
        return True

    def _write(self, piece: str | ToolCall, out: list[str | ToolCall]) -> None:
        """Move a call or a part of its arguments to `out`, up to the limit of calls."""
        if not piece or (self._limit is not None and self._calls > self._limit):
            return
        if isinstance(piece, str):
            if self._held is not None:
                self._held += piece
                return
            piece = ArgumentsText(piece)
        out.append(piece)


FORCED_CALLS: Final = ToolFormat("\0", opened=True, skip=("]", ","))
"""The JSON that a grammar forces for `tool_choice`: `[{"name": "add", "arguments": {...}}]`."""


def _name_of(found: regex.Match[str]) -> str | None:
    """Return the function that a pattern found, if it has a group for it."""
    name = found.groupdict().get("name")
    if name is None or "\\" not in name:
        return None if name is None else name.strip()
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return str(name)


def _call(name: str, arguments: str) -> ToolCall:
    return {
        # Mistral's templates accept no other form; agents send it back to any model.
        "id": "".join(secrets.choice(_LETTERS) for _ in range(9)),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Return text as a part of a JSON string."""
    return _quote(text)[1:-1]


def _text_in(literal: str) -> str:
    """Return the arguments that a JSON string holds."""
    try:
        return str(from_json(literal)).strip() or "{}"
    except ValueError:  # half a surrogate pair
        return literal


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


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
    json_text, _ = LiteralReader().feed(f"[{text}]")
    return json_text[1:-1]


def _type_of(value: Json) -> frozenset[str]:
    """Return the JSON types of a value; a whole number is an integer and a number."""
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int() | float():
            return frozenset({"number", "integer"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
        case _:
            return frozenset({"object"})


def _argument_types(function: Mapping[str, Json] | None) -> dict[str, frozenset[str]]:
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
        return _types_of(_resolve(str(schema["$ref"]), root), root, references + 1)
    named = schema.get("type")
    if named is not None:
        return frozenset().union(*map(_json_types, named if isinstance(named, list) else [named]))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(keyword), list) and choices:
            each = [_types_of(choice, root, references + 1) for choice in choices]
            return frozenset().union(*each) if all(each) else _ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset().union(*map(_type_of, values)) if isinstance(values, list) else _ANY


def _json_types(name: Json) -> frozenset[str]:
    plain = str(name).strip().lower()
    return frozenset(kind for kind, begins in _TYPES.items() if plain.startswith(begins))


def _resolve(reference: str, root: Json) -> Json:
    """Return the target of a reference within the same schema; None for any other reference."""
    target: Json = root if reference.startswith("#/") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _parse(parser: str, block: str, tools: Sequence[Mapping[str, Json]]) -> list[ToolCall]:
    """Return the calls that mlx-vlm's parser reads; empty if the text is no call."""
    try:
        parsed = load_tool_module(parser).parse_tool_call(block, list(tools))
        calls = parsed if isinstance(parsed, list) else [parsed]
        return [_whole_call(call["name"], call["arguments"]) for call in calls]
    except _PARSE_ERRORS:
        return []


def _whole_call(name: str, arguments: Json) -> ToolCall:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    arguments.encode()  # raises for half a surrogate pair, which no response can contain
    return _call(name.strip(), arguments)
