"""Tool calls in generated text: found while the text arrives, and read by mlx-vlm's parsers."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence

from workers.server.ports import Json

_KNOWN_TYPES = (
    *("str", "text", "varchar", "char", "enum", "bool", "binary", "num", "float"),
    *("int", "uint", "long", "short", "unsigned", "obj", "dict", "arr", "list"),
)
"""Prefixes of the type names that the parsers support; they evaluate values of others as Python."""
_MAX_REFERENCES = 16
"""Longest chain of `$ref`; a chain as long as the body allows would exhaust the stack."""
_PARSE_ERRORS = (
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


_LETTERS = string.ascii_letters + string.digits

ToolCall = dict[str, Json]
"""One call of a function in OpenAI's format, its arguments as JSON text."""


class ArgumentsText(str):
    """More of the arguments of the latest call."""

    __slots__ = ()


class ForcedCallReader:
    """Reads calls from the JSON that a request with a forced tool gets, while the text arrives.

    The grammar fixes its form: `[{"name": "add", "arguments": {...}}, ...]`.
    """

    _HEAD = re.compile(r'[\[}, ]*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')
    _STRUCTURE = re.compile(r'[{}"]|\\.')

    def __init__(self) -> None:
        self._buffer = ""
        self._depth = 0
        """Open braces of the arguments; 0 outside of them."""
        self._quoted = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """Add text; return calls as they begin, with empty arguments, and then their arguments."""
        self._buffer += text
        out: list[str | ToolCall] = []
        while self._buffer:
            if not self._depth:
                head = self._HEAD.match(self._buffer)
                if head is None or not self._buffer.startswith("{", head.end()):
                    break
                out.append(_call(json.loads(head[1]), ""))
                self._buffer = self._buffer[head.end() :]
            elif self._buffer == "\\":
                break  # the character after it decides
            arguments = self._take_arguments()
            out.append(ArgumentsText(arguments))
        return out

    def close(self, *, cut: bool = False) -> list[str | ToolCall]:  # noqa: ARG002
        """Return nothing: what is left is the end of the list, or a call that has no name yet."""
        return []

    def _take_arguments(self) -> str:
        """Return the text up to the end of the arguments, or up to an escape that is cut."""
        end = len(self._buffer)
        cut = len(self._buffer) - len(self._buffer.rstrip("\\"))
        if cut % 2:
            end -= 1
        for mark in self._STRUCTURE.finditer(self._buffer, 0, end):
            if mark[0] == '"':
                self._quoted = not self._quoted
            elif not self._quoted and mark[0] in "{}":
                self._depth += 1 if mark[0] == "{" else -1
                if not self._depth:
                    end = mark.end()
                    break
        taken, self._buffer = self._buffer[:end], self._buffer[end:]
        return taken


class ToolCallSplitter:
    """Splits arriving text into content and tool calls; buffers text that may begin a call."""

    def __init__(self, tool_format: ToolFormat, *, limit: int | None = None) -> None:
        self._format = tool_format
        self._limit = limit
        self._buffer = ""
        self._gap = ""  # white space before a call: dropped, unless the text is no call after all
        self._inside = False
        self._count = 0

    def feed(self, text: str) -> list[str | ToolCall]:
        """Add text; return the content and calls that are certain now, in order."""
        self._buffer += text
        out: list[str | ToolCall] = []
        while self._close_call(out) if self._inside else self._open_call(out):
            pass
        return out

    def close(self, *, cut: bool = False) -> list[str | ToolCall]:
        """Return the rest of the buffer; parse a call that the model did not close.

        A call that a limit `cut` off is left out: half of one is no text, and must not be run.
        """
        rest, self._buffer = self._buffer, ""
        if not self._inside:
            # White space after a call separates it from the next; elsewhere it is content.
            return [rest] if rest and not (self._count and not rest.strip()) else []
        return [] if cut else self._parse(rest + self._format.end, rest)

    def _open_call(self, out: list[str | ToolCall]) -> bool:
        """Move the content before a call to `out`; return whether a call begins."""
        marker = self._format.start
        start = self._buffer.find(marker)
        found = start >= 0
        if not found:
            start = len(self._buffer) - _overlap(self._buffer, marker)
        text = self._buffer[:start].rstrip()
        if found:
            self._gap = self._buffer[len(text) : start]
            self._inside = True
        self._buffer = self._buffer[start if found else len(text) :]
        if text:
            out.append(text)
        return found

    def _close_call(self, out: list[str | ToolCall]) -> bool:
        """Move a complete call to `out`; return False if it needs more text."""
        start, end = self._format.start, self._format.end
        position = self._buffer.find(end, len(start))
        ends = [position + len(end)] if position >= 0 else []
        if not self._format.is_closed:
            following = self._buffer.find(start, len(start))
            ends += [following] if following >= 0 else []
        if not ends:
            return False
        block = self._buffer[: min(ends)]
        self._buffer = self._buffer[len(block) :]
        self._inside = False
        out.extend(self._parse(block, block))
        return True

    def _parse(self, block: str, content: str) -> list[str | ToolCall]:
        calls = self._format.parse(block)
        if not calls:
            return [self._gap + content]
        if self._limit is not None:
            calls = calls[: max(0, self._limit - self._count)]
        self._count += len(calls)
        return list(calls)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class ToolFormat:
    """A model's format of tool calls: mlx-vlm's parser of it, for the tools of one request."""

    def __init__(self, parser_name: str, tools: Sequence[Mapping[str, Json]]) -> None:
        # Imported late: a worker without requests that use tools does not need it.
        from mlx_vlm.tools import load_tool_module  # noqa: PLC0415

        self._parser = load_tool_module(parser_name)
        self._tools = [_simplify_tool(tool) for tool in tools]
        self.start: str = self._parser.tool_call_start
        """The marker that begins a call."""
        self.is_closed = bool(self._parser.tool_call_end)
        """Whether calls have an end marker; without one, the next call may follow directly."""
        self.end: str = self._parser.tool_call_end or "\n"
        """The marker that ends a call; in some formats the end of the line."""

    def parse(self, block: str) -> list[ToolCall]:
        """Return the calls of one block, markers included; empty if it is no call."""
        inner = block.strip().removeprefix(self.start).removesuffix(self.end)
        try:
            parsed = self._parser.parse_tool_call(inner, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [_read_call(call["name"], call["arguments"]) for call in calls]
        except _PARSE_ERRORS:
            return []


def _read_call(name: str, arguments: Json) -> ToolCall:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    arguments.encode()  # raises for half a surrogate pair, which no response can contain
    return _call(name.strip(), arguments)


def _call(name: str, arguments: str) -> ToolCall:
    return {
        # Mistral's templates accept no other form; agents send it back to any model.
        "id": "".join(secrets.choice(_LETTERS) for _ in range(9)),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _simplify_tool(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return a copy of the tool that gives every argument one supported type, or none.

    The parsers support a single type name. They evaluate a list of types, by which OpenAI's strict
    tools allow null, as Python; some return null for every argument that may be null.
    """
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return tool
    simple = {name: _simplify_schema(schema, parameters) for name, schema in properties.items()}
    parameters = {**parameters, "properties": simple}
    return {**tool, "function": {**function, "parameters": parameters}}


def _simplify_schema(schema: Json, root: Mapping[str, Json], references: int = 0) -> Json:
    """Remove null from the types, follow references, and replace a single choice by itself.

    Every parser reads `null` as null anyway, and a value without a type as JSON, else as text.
    """
    if not isinstance(schema, Mapping):
        return schema
    simple = dict(schema)
    target = _resolve(str(simple.pop("$ref", "")), root)
    if references < _MAX_REFERENCES and isinstance(target, Mapping):
        return _simplify_schema({**target, **simple}, root, references + 1)
    if isinstance(simple.get("enum"), list):
        simple["enum"] = [value for value in simple["enum"] if value is not None]
    if isinstance(simple.get("type"), list):
        simple["anyOf"] = [{"type": kind} for kind in simple.pop("type")]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(simple.get(keyword), list):
            choices = [choice for choice in simple.pop(keyword) if not _is_null(choice)]
            if len(choices) == 1 and isinstance(choices[0], Mapping):
                return _simplify_schema({**simple, **choices[0]}, root, references)
            simple[keyword] = choices
    if not str(simple.get("type")).strip().lower().startswith(_KNOWN_TYPES):
        simple.pop("type", None)
    return simple


def _resolve(reference: str, root: Mapping[str, Json]) -> Json:
    """Return the target of a reference within the same schema; None for any other reference."""
    target: Json = root if reference.startswith("#/") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name) if isinstance(target, Mapping) else None
    return target


def _is_null(schema: Json) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"
