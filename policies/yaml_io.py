"""Bounded reading and writing of YAML, and the line of each field.

A running gateway parses documents from admins, so the cost must be bounded by the length of the
text: a few YAML lines can expand to millions of values, or nest until the stack overflows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import yaml

DEPTH_LIMIT = 32
VALUES_LIMIT = 20_000
# The C implementation, if PyYAML was built with it: ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_BAD_ALIAS = "an alias is undefined or contains itself"
# Context and problem as the parser words them (PyYAML and libyaml differ in the rest), and the
# reason for a person.
_REASONS = {
    ("while scanning a quoted scalar", ""): "the quotation mark here is not closed",
    ("while scanning a simple key", ""): "a ':' and a space are missing in this line",
    ("while scanning for the next token", ""): "a text that begins with '@', '`' or '%' needs "
    "quotation marks",
    ("while scanning an a", ""): "a text that begins with '*' or '&' needs quotation marks",
    ("while parsing a block mapping", ""): "expected 'field: value', indented like line {begins}",
    ("while parsing a block collection", ""): "expected '- ', indented like line {begins}",
    ("while parsing a block node", ""): "a value is missing in this line",
    ("expected a single document", ""): "a second document begins here; a policy is only one",
    ("while constructing a mapping", "unhashable"): "the name of a field must be text",
    ("", "mapping values are not allowed"): "this ':' is not possible here: check the "
    "indentation, and put quotation marks around a text that contains ': '",
    ("", "constructor for the tag"): "a policy cannot have tags such as '!name'",
}
# The place where these begin is the one to look at.
_AT_BEGIN = ("while scanning a quoted scalar", "while scanning a simple key")


class YamlInvalid(Exception):
    """A text is invalid or too large; `line` counts from 1 and is None if it is unknown."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def read_yaml(text: str) -> Any:
    """Parse YAML or JSON into plain values; raise `YamlInvalid`."""
    try:
        _check_events(text)
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            return None
        _measure(root, {})
        return _Loader("").construct_document(root)
    except yaml.MarkedYAMLError as error:
        raise _invalid(error, text) from None
    except yaml.YAMLError:
        raise YamlInvalid("it contains a character that YAML does not allow") from None
    except (ValueError, OverflowError):
        # For example an impossible date, or a number of ten thousand digits.
        raise YamlInvalid("it contains an invalid value") from None


def write_yaml(document: Any) -> str:
    """Return plain values as YAML; `read_yaml` parses it into the same values."""
    text: str = yaml.dump(
        document,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=None,
    )
    return text


def line_finder(text: str) -> Callable[[Sequence[str | int]], int | None]:
    """Return a function that maps the path of a field, or of its nearest parent, to its line.

    The size of the text must have been checked by `read_yaml`.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        root = None
    if root is None:
        return lambda _path: None
    lines = {(): root.start_mark.line + 1, **dict(_lines((), root))}

    def line_of(path: Sequence[str | int]) -> int:
        steps = tuple(map(str, path))
        while steps not in lines:
            steps = steps[:-1]
        return lines[steps]

    return line_of


def _lines(parent: tuple[str, ...], node: yaml.Node) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the path and the line of each value within the value of a field."""
    entries = []
    if isinstance(node, yaml.MappingNode):
        entries = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, first, value in entries:
        path = (*parent, name)
        yield path, first.start_mark.line + 1
        yield from _lines(path, value)


def _invalid(error: yaml.MarkedYAMLError, text: str) -> YamlInvalid:
    """Describe an error of the parser and its line."""
    found, begun = error.problem_mark, error.context_mark
    line = found.line + 1 if found else None
    begins = begun.line + 1 if begun else line
    problem, context = error.problem or "", error.context or ""
    character = text[found.index : found.index + 1] if found else ""
    for opening, closing in (("[", "]"), ("{", "}")):
        if f"',' or '{closing}'" in problem:
            place = "in this line" if begins == line else f"before line {line}"
            return YamlInvalid(
                f"the '{opening}' here is not closed: ',' or '{closing}' is missing {place}", begins
            )
    if context == "while parsing a flow node" and line is not None:
        return _value_missing(text, line)
    for (of_context, of_problem), reason in _REASONS.items():
        if context.startswith(of_context) and of_problem in problem:
            if character in ("]", "}") and of_context.startswith("while parsing"):
                return YamlInvalid(f"this '{character}' does not close a bracket", line)
            if character == "\t":
                return YamlInvalid("a tab cannot indent a line; use spaces", line)
            return YamlInvalid(
                reason.format(begins=begins), begins if context.startswith(_AT_BEGIN) else line
            )
    return YamlInvalid("it is not valid YAML", line)


def _value_missing(text: str, line: int) -> YamlInvalid:
    """Describe a missing value within brackets by the innermost bracket that is open there."""
    opened: list[int] = []
    with contextlib.suppress(yaml.YAMLError):  # the scanner reads ahead
        for token in yaml.scan(text, Loader=_Loader):
            if token.start_mark.line + 1 >= line:
                break
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                opened.append(token.start_mark.line + 1)
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
                del opened[-1:]
    if not opened:
        return YamlInvalid("a value is missing in this line", line)
    return YamlInvalid(f"the bracket that opens here is not closed before line {line}", opened[-1])


def _check_events(text: str) -> None:
    """Check depth and aliases before the text is composed, which recurses for every level."""
    anchors: set[str | None] = set()
    depth = 1
    for event in yaml.parse(text, Loader=_Loader):
        assert event.start_mark is not None, "every event of a text has a position"
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor not in anchors:
            raise YamlInvalid(_BAD_ALIAS, line)
        if isinstance(event, yaml.NodeEvent):
            anchors.add(event.anchor)
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_LIMIT:
            raise YamlInvalid(f"it is nested more than {DEPTH_LIMIT} levels deep", line)


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the values and levels of a node with all aliases expanded, each node once.

    Raises `YamlInvalid` beyond the limits, and for duplicate keys: parsers differ in which of the
    two values they use.
    """
    line = node.start_mark.line + 1
    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            raise YamlInvalid(_BAD_ALIAS, line)
        return known
    sizes[id(node)] = None
    inner = []
    if isinstance(node, yaml.SequenceNode):
        inner = [_measure(entry, sizes) for entry in node.value]
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            inner += [_measure(key, sizes), _measure(value, sizes)]
            name = str(key.value)
            if name in names:
                raise YamlInvalid(f"'{name[:100]}' is a duplicate key", key.start_mark.line + 1)
            names.add(name)
    values = 1 + sum(values for values, _ in inner)
    levels = 1 + max((levels for _, levels in inner), default=0)
    if values >= VALUES_LIMIT or levels > DEPTH_LIMIT:
        raise YamlInvalid("its aliases expand beyond the limits of a policy", line)
    sizes[id(node)] = values, levels
    return values, levels
