"""The page on reliability matches the tests: each row has a test, and each such test a row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_rows_of_the_page_match_the_numbered_tests() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    rows = set(re.findall(r"^\| ([FCLN]\d+) \|", page, re.MULTILINE))
    tests = {
        number.upper()
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def test_((?:[fcln]\d+_)+)", file.read_text())
        for number in re.findall(r"[fcln]\d+", name)
    }
    assert rows == tests
