"""A policy as text: every mistake is named by its line."""

from __future__ import annotations

import pytest

from policies.document import PolicyInvalid, parse_policy

WRITTEN = """\
version: 1
routes:
  - name: media
    when: {media: true}
    to:
      - vlm
      - fast
  - name: rest
    to: [vlm]
    colour: red
pools:
  vlm: {lanes: [vlm]}
"""


def test_every_mistake_in_a_text_is_named_by_line_in_their_order() -> None:
    with pytest.raises(PolicyInvalid) as invalid:
        parse_policy(WRITTEN.replace("name: media", "nam: media"), "mine.yaml")
    assert [(one.line, one.field) for one in invalid.value.problems] == [
        (3, "routes.0.name"),
        (3, "routes.0.nam"),
        (10, "routes.1.colour"),
    ]
    assert "line 10: routes.1.colour: there is no such field" in str(invalid.value)


def test_a_mistake_of_sense_in_a_text_has_a_line_too() -> None:
    with pytest.raises(PolicyInvalid, match=r"line 7: routes\.0\.to\.1: there is no pool 'fast'"):
        parse_policy(WRITTEN.replace("    colour: red\n", ""), "mine.yaml")


def test_a_field_that_stands_twice_is_refused_and_not_read_as_the_last_one() -> None:
    with pytest.raises(PolicyInvalid, match="line 13: 'pools' stands twice"):
        parse_policy(WRITTEN + "pools: {}\n", "mine.yaml")
