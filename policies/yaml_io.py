"""Bounded reading and writing of YAML, and the line of each field.

A running gateway parses documents from admins, so the cost must be bounded by the length of the
text: a few YAML lines can expand to millions of values, or nest until the stack overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

DEPTH_LIMIT = 32
VALUES_LIMIT = 20_000
# The C implementation, if PyYAML was built with it: ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_BAD_ALIAS = "an alias is undefined or contains itself"


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
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise YamlInvalid("it is not valid YAML", mark and mark.line + 1) from None
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


def line_of(text: str, field: str) -> int | None:
    """Return the line of a field (`routes.0.to`) or of its nearest parent, counted from 1.

    The size of the text must have been checked by `read_yaml`.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return None
    if root is None:
        return None
    lines = {**dict(_lines("", root)), "": root.start_mark.line + 1}
    while field not in lines:
        field = field.rpartition(".")[0]
    return lines[field]


def _lines(field: str, node: yaml.Node) -> Iterator[tuple[str, int]]:
    """Yield the path and the line of each value within the value of a field."""
    entries = []
    if isinstance(node, yaml.MappingNode):
        entries = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        entries = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, first, value in entries:
        path = f"{field}.{name}" if field else name
        yield path, first.start_mark.line + 1
        yield from _lines(path, value)


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
