"""YAML of a policy: what is accepted, what is rejected before it costs memory, and line numbers."""

import contextlib
import re
from importlib import resources
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from policies.yaml_io import DEPTH_LIMIT, YamlInvalid, line_finder, read_yaml

TEXT = """\
version: 1
models:
  Qwen/Qwen3.5-4B:
    sampling: {temperature: 7}
routes:
- name: a
  to: [vlm]
- {name: b,
   to: [fast]}
"""


def test_ordinary_yaml_and_json_are_read_as_by_pyyaml() -> None:
    text = (resources.files("policies") / "default.yaml").read_text()
    anchored = "a: &it {x: 1}\nb: *it\nc: {<<: *it, y: 2}"
    for one in (text, '{"a": [1, 2.5, true, null, "ü"]}', anchored, ""):
        assert read_yaml(one) == yaml.safe_load(one)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a: 1\nb: !!python/object:os.system x", "a policy cannot have tags such as '!name'", 2),
        ("a: 1\n? [b]\n: 2", "the name of a field must be text", 2),
        ("a: 1\nb: 2\na: 3", "'a' is a duplicate key", 3),
        ("a:\n  b: 1\n  'b': 2", "'b' is a duplicate key", 3),
        ("a: *nothing", "an alias is undefined or contains itself", 1),
        ("a:\n - &it [*it]", "an alias is undefined or contains itself", 2),
        ("a: 2001-99-99", "it contains an invalid value", None),
        ("a: " + "1" * 5000, "it contains an invalid value", None),
        ("\x00", "it contains a character that YAML does not allow", None),
        ("a: 1\n---\nb: 1", "a second document begins here; a policy is only one", 2),
        ("a: 1\nb: @x", "a text that begins with '@', '`' or '%' needs quotation marks", 2),
        ("a: 1\nb: *", "a text that begins with '*' or '&' needs quotation marks", 2),
        ("a: &x 1\nb: &x 2", "it is not valid YAML", 2),
        # Where something is missing, the line is that in which it begins.
        ("a:\n- to: [b, c\n- to: [d]", "'[' here is not closed: ',' or ']' is missing before", 2),
        ("a: {b: 1, c: 2\nd: 3", "'{' here is not closed: ',' or '}' is missing before line 2", 1),
        ("a: 1\nb: {c: [1, 2}, d: 3}", "',' or ']' is missing in this line", 2),
        ("a: 1\nb: [c,\n  d,\n  - e\n", "bracket that opens here is not closed before line 4", 2),
        ("a: 1\nb: 'c\nd: 1", "the quotation mark here is not closed", 2),
        ("a: 1\nb: [c]]\n", "this ']' does not close a bracket", 2),
        ("a: 1\nb: }\n", "this '}' does not close a bracket", 2),
        ("a:\n  b: 1\n c: 2", "indented like line 1", 3),
        ("a:\n  - b: 1\n   c: 2", "expected '- ', indented like line 2", 3),
        ("a: 1\nb\nc: 2", "a ':' and a space are missing in this line", 2),
        ("a: 1\nb: c: d", "this ':' is not possible here: check the indentation", 2),
        ("a:\n\tb: 1", "a tab cannot indent a line; use spaces", 2),
    ],
)
def test_invalid_yaml_is_rejected_with_its_line(text: str, message: str, line: int | None) -> None:
    with pytest.raises(YamlInvalid, match=re.escape(message)) as invalid:
        read_yaml(text)
    assert invalid.value.line == line


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_the_depth_of_nesting_is_bounded(opening: str) -> None:
    for levels in (DEPTH_LIMIT + 1, 100_000):
        with pytest.raises(YamlInvalid, match="nested more than 32 levels deep"):
            read_yaml(opening * levels)


def test_aliases_may_nest_as_deeply_as_plain_values_and_not_expand_exponentially() -> None:
    def chain(levels: int, copies: int = 1) -> str:
        aliases = [
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * copies)}]" for n in range(1, levels - 1)
        ]
        return "\n".join(["a0: &a0 []", *aliases])

    assert len(read_yaml(chain(DEPTH_LIMIT))) == DEPTH_LIMIT - 1
    for text in (chain(DEPTH_LIMIT + 1), chain(100), chain(10, copies=9)):
        with pytest.raises(YamlInvalid, match="beyond the limits of a policy"):
            read_yaml(text)


@given(st.text())
def test_any_text_is_read_or_raises_yaml_invalid(text: str) -> None:
    with contextlib.suppress(YamlInvalid):
        read_yaml(text)
    assert (line_finder(text)(("a", "b")) or 1) >= 1


LINES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zl", "Zp")))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | LINES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LINES, inner, max_size=3),
    max_leaves=20,
)


@given(PLAIN)
def test_a_value_dumped_as_yaml_is_read_back_unchanged(value: Any) -> None:
    assert read_yaml(yaml.safe_dump(value, allow_unicode=True)) == value


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("version",), 1),
        (("models", "Qwen/Qwen3.5-4B", "sampling", "temperature"), 4),
        (("models", "Qwen/Qwen3.5-4B", "sampling", "top_p"), 4),
        (("routes",), 5),
        (("routes", 0), 6),
        (("routes", 0, "to", 0), 7),
        (("routes", 1, "to"), 9),
        (("routes", 2), 5),
        (("routes", 1, "when", "media", "bool"), 8),
        (("pools",), 1),
        ((), 1),
    ],
)
def test_the_line_is_that_of_the_nearest_parent(path: tuple[str | int, ...], line: int) -> None:
    assert line_finder(TEXT)(path) == line


@pytest.mark.parametrize("text", ["", "a: ["])
def test_an_empty_or_invalid_text_has_no_line_numbers(text: str) -> None:
    assert line_finder(text)(("a",)) is None
