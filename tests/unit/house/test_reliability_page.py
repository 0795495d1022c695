"""The page on reliability is true to the tests: no row without a test, no tested row left out."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_row_of_the_page_has_its_test_and_every_such_test_has_its_row() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    rows = set(re.findall(r"^\| F(\d\d) \|", page, re.MULTILINE))
    tests = {
        number
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def test_((?:f\d\d_)+)", file.read_text())
        for number in re.findall(r"f(\d\d)", name)
    }
    assert rows == tests
