"""Tool calls in generated text: found while the text arrives.

A call begins as soon as its function is known, and its arguments follow as the model writes them,
as parts of one JSON text. Outside of its own format a model's call counts only where it begins a
line, outside of code fences, and names a tool of the request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Final

import regex

from paceline.request.call_rules import CallRules
from workers.engine.text.detokenizer import overlap
from workers.engine.text.tool_formats import Call, ToolFormat
from workers.server.engines import Json
from workers.server.tool_arguments import (
    ArgumentsReader,
    LiteralReader,
    TagReader,
    argument_types,
)

logger = logging.getLogger(__name__)

ToolCall = dict[str, Json]
"""One call of a function in OpenAI's format, its arguments as JSON text."""

_LETTERS: Final = string.ascii_letters + string.digits
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
_FENCE: Final = re.compile(r"\s*(`{3,}(?=[^`]*$)|~{3,})")
_LINE_CHARS: Final = 256
"""Characters of a line of content that decide whether it is a fence."""


class ArgumentsText(str):
    """More of the arguments of the latest call."""

    __slots__ = ()


class _Lines:
    """Lines of the content so far, and the code fence around the last one."""

    def __init__(self) -> None:
        self._fence = ""
        self._line = ""
        """The last line, which has not ended."""

    @property
    def may_call(self) -> bool:
        """Whether the next text begins a line outside of code fences."""
        return not self._fence and not self._line.strip()

    def add(self, text: str) -> None:
        """Add content."""
        *ended, last = (self._line + text).split("\n")
        for line in ended:
            mark = _FENCE.match(line)
            if mark and not self._fence:
                self._fence = mark[1]
            elif mark and mark[1].startswith(self._fence) and not line[mark.end() :].strip():
                self._fence = ""
        self._line = last[:_LINE_CHARS]

    def break_line(self) -> None:
        """Begin a line, as behind a call."""
        self._line = ""


class ToolCallSplitter:
    """Splits arriving text into content, calls as they begin, and their arguments.

    It holds back text that may begin a call, and leaves out calls that `rules` do not admit.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Mapping[str, Json]] = (),
        rules: CallRules | None = None,
    ) -> None:
        self._format = tool_format
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._declared = list(tools)
        self._strays = tool_format.strays if tools else ()
        self._lines = _Lines()
        self._rules = rules
        self._buffer = ""
        self._marked = False
        """Whether the marker of calls precedes; without one, only known functions are called."""
        self._opening = ""
        """White space and the marker that precede a possible call."""
        self._calls = self._left_out = 0
        """All calls, and those of them that are left out."""
        self._admitted = True
        """Whether the rules admit the latest call."""
        self._call = Call("")
        self._reader: ArgumentsReader = LiteralReader()
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
        """End the text; return the text that was held back.

        If a limit has `cut` off a call, its arguments end where they are, and a call without a name
        is left out: half of it is no text.
        """
        rest = self._buffer
        if self._step == self._arguments:
            out: list[str | ToolCall] = []
            if self._held is None:
                self._write("" if cut else self._reader.close(), out)
            elif not cut:
                out.append(self._opening + self._held)
            return out
        if self._step == self._next or (self._step == self._tail and self._held is None):
            # What may begin a mark is one, but for its first letter.
            return [rest] if len(rest) == 1 and not rest.isspace() and not cut else []
        if self._step in (self._text, self._ended):
            held = overlap(rest, self._format.begin)
            if cut and (held > 1 or (held and self._calls)):
                rest = rest[:-held]
            # White space after a call separates it from the next; elsewhere it is content.
            return [rest] if rest and not (self._calls and not rest.strip()) else []
        text = self._opening + (self._held or "") + rest
        if cut:
            is_word = self._step == self._begin and not (self._marked or self._format.opened)
            return [text] if is_word and not rest.lstrip().startswith("<") else []
        earlier, ended = self._calls, self.feed(self._format.end)
        return ended if self._calls > earlier else [text] if text else []

    def _text(self, out: list[str | ToolCall]) -> bool:
        """Move the content before a call to `out`; return whether a call may begin."""
        begin = self._format.begin
        start = self._buffer.find(begin)
        found = start >= 0
        if not found:
            start = len(self._buffer) - overlap(self._buffer, begin)
        stray = self._find_stray(start)
        if stray is not None:
            start, found, begin = stray, True, ""
        text = self._buffer[:start].rstrip()
        if found:
            self._opening, self._marked = self._buffer[len(text) : start + len(begin)], bool(begin)
            self._step = self._block if self._format.parser and begin else self._begin
        self._buffer = self._buffer[start + len(begin) if found else len(text) :]
        self._add_text(text, out)
        return found

    def _find_stray(self, end: int) -> int | None:
        """Return the first place before `end` where a call may begin that is not the format's own.

        A line whose beginning is not one is content.
        """
        lines, at = copy(self._lines), 0
        while self._strays and at < end:
            if lines.may_call and self._buffer[at:end].strip() and self._heads(self._strays, at):
                return at
            until = self._buffer.find("\n", at, end) + 1 or end
            lines.add(self._buffer[at:until])
            at = until
        return None

    def _heads(
        self, calls: Sequence[Call], at: int = 0, *, named: bool = True
    ) -> list[tuple[Call, regex.Match[str]]]:
        """Return the calls that may begin at a place; `named` ones have a name of a tool."""
        matches = (
            (call, call.head_pattern.match(self._buffer, at, partial=True)) for call in calls
        )
        return [
            (call, head)
            for call, head in matches
            if head and not (named and self._is_other_word(call, head, at))
        ]

    def _is_other_word(self, call: Call, head: regex.Match[str], at: int) -> bool:
        """Return whether a head begins with another word than a tool; prose waits for nothing."""
        if not head.partial:
            name = self._name(head)
            return name is not None and name not in self._tools
        lead = call.lead_pattern and call.lead_pattern.match(self._buffer, at)
        word = self._buffer[lead.end() :] if lead else ""
        return not word.startswith("<") and not any(
            tool.startswith(word) or word.startswith(tool) for tool in self._tools
        )

    def _add_text(self, text: str, out: list[str | ToolCall]) -> None:
        if text:
            self._lines.add(text)
            out.append(text)

    def _begin(self, out: list[str | ToolCall]) -> bool:
        """Read a call up to its arguments, or find that the text is no call."""
        plain = self._format.plain
        if plain and plain.startswith(self._buffer[: len(plain)]):
            if len(self._buffer) < len(plain):
                return False
            self._buffer, self._opening = self._buffer[len(plain) :], ""
        else:
            free = self._marked or not self._tools
            own = self._format.calls if free or self._format.opened else ()
            heads = self._heads(own, named=not free) + self._heads(self._strays)
            for call, head in heads:
                if not head.partial:
                    self._buffer = self._buffer[head.end() :]
                    self._start(call, self._name(head), out)
                    return True
            if any(head.partial for _, head in heads):
                return False
        self._add_text(self._opening, out)
        self._step, self._marked = self._text, False
        return True

    def _name(self, found: regex.Match[str]) -> str | None:
        """Return the function that a pattern found: a tool, also behind the name of its group."""
        name: str | None = found.groupdict().get("name")
        if name is None:
            return None
        if "\\" in name:
            with contextlib.suppress(ValueError):
                name = str(json.loads(f'"{name}"'))
        else:
            name = name.strip()
        if name in self._tools:
            return name
        groups = (name.partition(mark)[2].strip() for mark in ":.")
        return next((tool for tool in groups if tool in self._tools), name)

    def _start(self, call: Call, name: str | None, out: list[str | ToolCall]) -> None:
        self._call = call
        self._held = None if name is not None else ""
        self._calls += 1
        self._lines.break_line()
        if call.tags is not None:
            types = argument_types(self._tools.get(name or ""))
            self._reader = TagReader(call.tags, call.tail_pattern, self._format.end, types)
        else:
            self._reader = LiteralReader(self._format.quote, self._format.stop_pattern)
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
            name = self._name(tail)
            if self._held is not None and name is not None:
                arguments, self._held = self._held, None
                self._write(_call(name, ""), out)
                self._write(arguments, out)
        self._step = self._next
        return True

    def _next(self, out: list[str | ToolCall]) -> bool:  # noqa: ARG002
        """Skip the text between two calls; find the next one, or the end of all."""
        self._buffer = self._buffer.lstrip()
        for text in filter(None, (self._format.end, *self._format.skip)):
            if self._buffer.startswith(text):
                self._buffer = self._buffer[len(text) :]
                if text == self._format.end:
                    self._step, self._marked = self._ended, False
                return True
            if text.startswith(self._buffer):
                return False
        if self._buffer:
            self._opening, self._step = "", self._begin
        return bool(self._buffer)

    def _ended(self, out: list[str | ToolCall]) -> bool:  # noqa: ARG002
        """Skip a mark that ends the calls once more, as some models write it."""
        rest, end = self._buffer.lstrip(), self._format.end
        if rest.startswith(end):
            self._buffer = rest[len(end) :]
            return True
        if rest and end.startswith(rest):
            return False
        if rest:
            self._step = self._text
        return bool(rest)

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
        """Move a call or a part of its arguments to `out`, unless the call is left out."""
        if isinstance(piece, str):
            if self._held is not None:
                self._held += piece
            elif piece and self._admitted:
                out.append(ArgumentsText(piece))
            return
        name, earlier = piece["function"]["name"], self._calls - self._left_out - 1
        self._admitted = self._rules is None or self._rules.admits(name, earlier)
        if self._admitted:
            out.append(piece)
        else:
            self._left_out += 1
            logger.warning("calls.left_out")


FORCED_CALLS: Final = ToolFormat("\0", opened=True, skip=("]", ","))
"""The JSON that a grammar forces for `tool_choice`: `[{"name": "add", "arguments": {...}}]`."""


def _call(name: str, arguments: str) -> ToolCall:
    return {
        # Mistral's templates accept no other form; agents send it back to any model.
        "id": "".join(secrets.choice(_LETTERS) for _ in range(9)),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _parse(parser: str, block: str, tools: Sequence[Mapping[str, Json]]) -> list[ToolCall]:
    """Return the calls that mlx-vlm's parser reads; empty if the text is no call."""
    from mlx_vlm.tools import load_tool_module  # noqa: PLC0415  # wrong settings need no MLX

    calls = []
    try:
        parsed = load_tool_module(parser).parse_tool_call(block, list(tools))
        for call in parsed if isinstance(parsed, list) else [parsed]:
            arguments = call["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            arguments.encode()  # raises for half a surrogate pair, which no response can contain
            calls.append(_call(call["name"].strip(), arguments))
    except _PARSE_ERRORS:
        return []
    return calls
