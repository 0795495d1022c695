"""Tool calls cut out of the text of an answer while it arrives.

Tools as mlx-vlm's parsers can read them: one plain type for an argument, or none.

These parsers know a type by a single name. A list of names, which is how OpenAI's strict tools say
that an argument may be null, is evaluated as Python; some give null for all that may be null.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workers.server.ports import Json

# How the names begin that these parsers know; a value of any other type they evaluate as Python.
_KNOWN_TYPES = (
    *("str", "text", "varchar", "char", "enum", "bool", "binary", "num", "float"),
    *("int", "uint", "long", "short", "unsigned", "obj", "dict", "arr", "list"),
)

# More than anybody writes; a chain as long as the body allows would end the recursion.
_REFERENCES_FOLLOWED = 16


def plain_tools(tools: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """Return copies of the tools in which no argument has several types, or an unknown one."""
    return [_plain_tool(tool) for tool in tools]


def _plain_tool(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    function = tool["function"]
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping):
        return tool
    plain = {name: _plain_schema(schema, parameters) for name, schema in properties.items()}
    parameters = {**parameters, "properties": plain}
    return {**tool, "function": {**function, "parameters": parameters}}


def _plain_schema(schema: Json, root: Mapping[str, Json], followed: int = 0) -> Json:
    """Leave null out, and let what remains alone, or is referred to, stand for the whole.

    Every parser reads `null` as null anyway, and what has no type as JSON or else as text.
    """
    if not isinstance(schema, Mapping):
        return schema
    plain = dict(schema)
    reference = str(plain.pop("$ref", ""))
    if followed < _REFERENCES_FOLLOWED and isinstance(meant := _meant(reference, root), Mapping):
        return _plain_schema({**meant, **plain}, root, followed + 1)
    if isinstance(plain.get("enum"), list):
        plain["enum"] = [value for value in plain["enum"] if value is not None]
    if isinstance(plain.get("type"), list):
        plain["anyOf"] = [{"type": kind} for kind in plain.pop("type")]
    for several in ("anyOf", "oneOf"):
        if isinstance(plain.get(several), list):
            choices = [choice for choice in plain.pop(several) if not _is_null(choice)]
            if len(choices) == 1 and isinstance(choices[0], Mapping):
                return _plain_schema({**plain, **choices[0]}, root, followed)
            plain[several] = choices
    if not str(plain.get("type")).strip().lower().startswith(_KNOWN_TYPES):
        plain.pop("type", None)
    return plain


def _meant(reference: str, root: Mapping[str, Json]) -> Json:
    """Find what a reference into the same schema means; None for any other."""
    found: Json = root if reference.startswith("#/") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_null(schema: Json) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


# What mlx-vlm's parsers raise on text that only looks like a call: it is then answered as text.
_NOT_A_CALL = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ArithmeticError,
    SyntaxError,
    RecursionError,
    MemoryError,  # Python's own parser, of values that are nested too deeply
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a function, its arguments as JSON text."""

    call_id: str
    name: str
    arguments: str


class ToolFormat:
    """How a model writes calls: mlx-vlm's parser of that format, for the tools of one request."""

    def __init__(self, parser_name: str, tools: Sequence[Mapping[str, Json]]) -> None:
        self._parser_name = parser_name
        self._tools = plain_tools(tools)

    @cached_property
    def _parser(self) -> Any:
        # Imported late: a worker that is asked for no tools needs none of it.
        from mlx_vlm.tools import load_tool_module  # noqa: PLC0415

        return load_tool_module(self._parser_name)

    @property
    def start(self) -> str:
        """What opens a call."""
        return str(self._parser.tool_call_start)

    @property
    def end(self) -> str:
        """What closes a call; some formats end it with the line."""
        return str(self._parser.tool_call_end) or "\n"

    @property
    def is_closed(self) -> bool:
        """Say whether the format closes its calls; else one may follow another at once."""
        return bool(self._parser.tool_call_end)

    def parse(self, block: str) -> list[ToolCall]:
        """Read the calls of one block, markers included; empty where it is none."""
        inner = block.strip().removeprefix(self.start).removesuffix(self.end)
        try:
            parsed = self._parser.parse_tool_call(inner, self._tools)
            calls = parsed if isinstance(parsed, list) else [parsed]
            return [_read_call(call["name"], call["arguments"]) for call in calls]
        except _NOT_A_CALL:
            return []


def _read_call(name: str, arguments: Json) -> ToolCall:
    text = (
        arguments
        if isinstance(arguments, str)
        else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    )
    text.encode()  # raises on half a surrogate pair, which no answer can carry
    return ToolCall(call_id=f"call_{secrets.token_hex(12)}", name=name.strip(), arguments=text)


class ToolCallSplitter:
    """Splits arriving text into content and calls, and holds back what may begin a call."""

    def __init__(self, tool_format: ToolFormat, *, at_most: int | None = None) -> None:
        self._format = tool_format
        self._at_most = at_most
        self._held = ""
        self._gap = ""  # white space before a call: part of its layout, unless it is none
        self._inside = False
        self.found = 0

    def feed(self, text: str) -> list[str | ToolCall]:
        """Take more text; return what is certain now, in order."""
        self._held += text
        out: list[str | ToolCall] = []
        while self._step(out):
            pass
        return out

    def close(self) -> list[str | ToolCall]:
        """Return what was still held back; a call cut off by the end is read if it can be."""
        rest, self._held = self._held, ""
        if not self._inside:
            # White space after a call is layout too; at the end of a text it is text.
            return [rest] if rest and not (self.found and not rest.strip()) else []
        return self._read(rest + self._format.end, rest)

    def _step(self, out: list[str | ToolCall]) -> bool:
        """Move one piece from what is held to `out`; False when more text is needed."""
        marker = self._format.end if self._inside else self._format.start
        begin = len(self._format.start) if self._inside else 0
        at = self._held.find(marker, begin)
        if self._inside:
            ends = [at + len(marker)] if at >= 0 else []
            following = -1 if self._format.is_closed else self._held.find(self._format.start, begin)
            if following >= 0:
                ends.append(following)
            if not ends:
                return False
            block = self._held[: min(ends)]
            self._held = self._held[len(block) :]
            self._inside = False
            out.extend(self._read(block, block))
            return True
        certain = at if at >= 0 else len(self._held) - _tail_that_may_begin(self._held, marker)
        text = self._held[:certain].rstrip()
        if at >= 0:
            self._gap = self._held[len(text) : at]
            self._held = self._held[at:]
            self._inside = True
        else:
            self._held = self._held[len(text) :]
        if text:
            out.append(text)
        return at >= 0

    def _read(self, block: str, as_written: str) -> list[str | ToolCall]:
        calls = self._format.parse(block)
        if not calls:
            return [self._gap + as_written]
        if self._at_most is not None:
            calls = calls[: max(0, self._at_most - self.found)]
        self.found += len(calls)
        return list(calls)


def _tail_that_may_begin(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
