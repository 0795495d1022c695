"""A policy as somebody wrote it: YAML as plain values, bounded, and the line of each field.

What an admin sends is read in a running gateway, so a text must not cost it more than its length:
YAML lets a few lines name each other until they mean millions, or nest until the stack is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

DEPTH_LIMIT = 32
VALUES_LIMIT = 20_000
# Written in C where PyYAML was built so: ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class YamlInvalid(ValueError):
    """A text is no YAML that is taken; `line` says where, counted from 1, if that is known."""

    def __init__(self, what: str, line: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


def read_yaml(text: str) -> Any:
    """Read YAML (so also JSON) as plain values; raise `YamlInvalid`."""
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
        raise YamlInvalid("it is not YAML", mark and mark.line + 1) from None
    except (ValueError, OverflowError) as error:
        if isinstance(error, YamlInvalid):
            raise
        # A date that does not exist, a number of ten thousand digits.
        raise YamlInvalid("it holds a value that cannot be read") from None


def write_yaml(document: Any) -> str:
    """Write plain values as YAML that `read_yaml` reads the same, the innermost in one line."""
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
    """Find the line of a field (`routes.0.to`), or of what should hold it; counted from 1."""
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
    """List what stands right inside a value; the longest names first, since names hold dots."""
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

    def holding(self, inner: _Size) -> _Size:
        return _Size(self.values + inner.values, max(self.depth, inner.depth + 1))


def _check_size(text: str) -> None:
    """Bound what a text means, aliases followed, before anything is made of it."""
    anchors: dict[str, _Size] = {}
    open_values: list[tuple[str | None, _Size]] = [(None, _Size())]
    for event in yaml.parse(text, Loader=_Loader):
        inner: _Size | None = None
        assert event.start_mark is not None, "what is parsed from text stands somewhere"
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
                raise YamlInvalid("an alias means nothing, or holds itself", line)
        if len(open_values) > DEPTH_LIMIT:
            raise YamlInvalid(f"it is nested more than {DEPTH_LIMIT} deep", line)
        if inner is not None:
            anchor, outer = open_values.pop()
            outer = outer.holding(inner)
            if outer.values > VALUES_LIMIT or outer.depth > DEPTH_LIMIT + 1:
                raise YamlInvalid("it means more than a policy can hold", line)
            open_values.append((anchor, outer))


def _check_keys(root: yaml.Node) -> None:
    """Refuse a key that stands twice: readers differ in which of the two counts."""
    seen: set[int] = set()
    left = [root]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if name in names:
                    raise YamlInvalid(f"'{name[:100]}' stands twice", key.start_mark.line + 1)
                names.add(name)
                left.append(value)
