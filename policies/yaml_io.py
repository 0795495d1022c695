"""Bounded reading and writing of YAML, and the line of each field.

A running gateway parses documents from admins, so the cost must be bounded by the length of the
text: a few YAML lines can expand to millions of values, or nest until the stack overflows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

DEPTH_LIMIT = 32
VALUES_LIMIT = 20_000
# The C implementation, if PyYAML was built with it: ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class YamlInvalid(ValueError):
    """A text is invalid or too large; `line` counts from 1 and is None if it is unknown."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.line = line


def read_yaml(text: str) -> Any:
    """Parse YAML or JSON into plain values; raise `YamlInvalid`."""
    try:
        _check_size(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_keys(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise YamlInvalid("it is not valid YAML", mark and mark.line + 1) from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, YamlInvalid):
            raise
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
    """Return the line of a field (`routes.0.to`) or of its nearest parent, counted from 1."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return None
    if node is None:
        return None
    line = node.start_mark.line
    while field:
        step = next((step for step in _steps(node) if _leads_to(field, step.name)), None)
        if step is None:
            break
        line, node = step.line, step.node
        field = field[len(step.name) + 1 :]
    return int(line) + 1


class _Step(NamedTuple):
    name: str
    line: int
    node: yaml.Node


def _steps(node: yaml.Node) -> Iterator[_Step]:
    """Yield the entries of a value; the longest names first, since names may contain dots."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key.start_mark.line, value) for key, value in node.value]
        for name, line, value in sorted(pairs, key=lambda pair: -len(pair[0])):
            yield _Step(name, line, value)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield _Step(str(index), value.start_mark.line, value)


def _leads_to(field: str, name: str) -> bool:
    return field == name or field.startswith(f"{name}.")


class _Size(NamedTuple):
    values: int = 1
    depth: int = 1

    def including(self, inner: _Size) -> _Size:
        return _Size(self.values + inner.values, max(self.depth, inner.depth + 1))


def _check_size(text: str) -> None:
    """Check the size of a text with all aliases expanded, before anything is constructed."""
    anchors: dict[str, _Size] = {}
    open_values: list[tuple[str | None, _Size]] = [(None, _Size())]
    for event in yaml.parse(text, Loader=_Loader):
        inner: _Size | None = None
        assert event.start_mark is not None, "every event of a text has a position"
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append((event.anchor, _Size()))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, inner = open_values.pop()
            if anchor is not None:
                anchors[anchor] = inner
        elif isinstance(event, yaml.ScalarEvent):
            inner = _Size()
            if event.anchor is not None:
                anchors[event.anchor] = inner
        elif isinstance(event, yaml.AliasEvent):
            inner = anchors.get(event.anchor or "")
            if inner is None:
                raise YamlInvalid("an alias is undefined or contains itself", line)
        if len(open_values) > DEPTH_LIMIT:
            raise YamlInvalid(f"it is nested more than {DEPTH_LIMIT} levels deep", line)
        if inner is not None:
            anchor, outer = open_values.pop()
            outer = outer.including(inner)
            if outer.values > VALUES_LIMIT or outer.depth > DEPTH_LIMIT + 1:
                raise YamlInvalid("its aliases expand beyond the limits of a policy", line)
            open_values.append((anchor, outer))


def _check_keys(root: yaml.Node) -> None:
    """Refuse duplicate keys: parsers differ in which of the two values they use."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in names:
                    raise YamlInvalid(f"'{name[:100]}' is a duplicate key", key.start_mark.line + 1)
                names.add(name)
                pending.append(value)
